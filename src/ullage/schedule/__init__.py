"""Pipeline schedules: what each rank does, in order. One generator per file; ``catalogue`` names them."""

from ullage.schedule.analysis import bubble_fraction, chunks_in_flight, compact, finish_times, in_flight
from ullage.schedule.base import Action, Shape
from ullage.schedule.catalogue import actions
from ullage.schedule.interleaved import torch_group_size
from ullage.schedule.placement import stages_on

__all__ = [
    "Action",
    "Shape",
    "actions",
    "bubble_fraction",
    "chunks_in_flight",
    "compact",
    "finish_times",
    "in_flight",
    "stages_on",
    "torch_group_size",
]
