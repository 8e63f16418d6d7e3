"""A process that maps a sender's buffers and stays."""

from __future__ import annotations

import threading

import torch
from antiphon.types.v1 import transfer_pb2

from services.common.weights.receiver import Receiver


def map_and_stay(manifest: bytes, rank: int) -> None:
    held = Receiver(
        transfer_pb2.TransferManifest.FromString(manifest), rank, device=torch.device("cuda:0"), deadline_seconds=60
    )
    threading.Event().wait()
    held.close()
