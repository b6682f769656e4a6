"""What the machine is, by name: the public face of store.py (data files) and spec.py (a job's `cluster`)."""

from ullage.hardware.spec import cluster
from ullage.hardware.store import aliases, device, devices, node_type, node_types

__all__ = ["aliases", "cluster", "device", "devices", "node_type", "node_types"]
