"""Devices, networks and prices: the time and memory of layouts, and the search for the best."""

from .curve import Curve, bus_factor
from .device import (
    Chip,
    Device,
    MachineError,
    Memory,
    device,
    device_named,
    devices,
)
from .hierarchy import Place, hierarchy
from .link import Cluster, Level, Link, cluster, clusters, link, links
from .machine import Hidden, Machine, Rate, Store
from .topology import Topology, TopologyError, parse_topology, read_topology

__all__ = [
    "Chip",
    "Cluster",
    "Curve",
    "Device",
    "Hidden",
    "Level",
    "Link",
    "Machine",
    "MachineError",
    "Memory",
    "Place",
    "Rate",
    "Store",
    "Topology",
    "TopologyError",
    "bus_factor",
    "cluster",
    "clusters",
    "device",
    "device_named",
    "devices",
    "hierarchy",
    "link",
    "links",
    "parse_topology",
    "read_topology",
]
