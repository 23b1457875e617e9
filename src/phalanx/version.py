"""The version of this tree; the build reads it from here, so a tree that is not installed knows it too."""

VERSION = "0.2.0"
