"""Layouts of released libraries, recorded and compared with one process: the table of docs/audited.md."""
