"""The process of the reference model: `python -m services.reward.reference_child`. Torch is loaded in here only.

It connects to the service's Unix socket, says hello when the model is loaded, and answers micro-batches, one after the
other (protos/antiphon/reward/v1/reference.proto). It ends when the socket closes; the kernel kills it when the service
dies (services/common/processes.py).
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from antiphon.reward.v1 import reference_pb2, reward_pb2

from services.common import logs
from services.common.errors import ConfigError
from services.common.framing import receive_frame, send_frame

logger = logging.getLogger(__name__)


class Model(Protocol):
    """What the process needs of services/reward/reference_model.py; tests put a twin without torch in its place."""

    digest: int
    tokenizer_digest: bytes
    vocabulary_size: int
    max_sequence_tokens: int

    def logprobs(self, rows: Sequence[Sequence[int]], temperature: float) -> list[list[float]]: ...


MakeModel = Callable[[str, str, str], Model]
"""(path, dtype, device) → the loaded model. Raises ConfigError for one that can never be used."""


def make_reference_model(path: str, dtype: str, device: str) -> Model:
    from services.reward.reference_model import ReferenceModel

    return ReferenceModel(path, dtype, device)


def serve(channel: socket.socket, model: Model) -> None:
    """Answers until the service closes the socket. What a micro-batch raises ends the process: it is a bug."""
    while (data := receive_frame(channel)) is not None:
        command = reference_pb2.ReferenceCommand.FromString(data)
        rows = model.logprobs([list(sequence.ids) for sequence in command.sequences], command.temperature)
        answer = reference_pb2.ReferenceRows(rows=[reference_pb2.ReferenceRow(logprobs=row) for row in rows])
        _reply(channel, reference_pb2.ReferenceReply(rows=answer))


def main(make_model: MakeModel = make_reference_model) -> int:
    parser = argparse.ArgumentParser(prog="python -m services.reward.reference_child")
    parser.add_argument("--socket", type=Path, required=True, help="the service listens there")
    parser.add_argument("--path", required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", required=True)
    arguments = parser.parse_args()
    logs.configure("reference", "INFO")
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel.connect(str(arguments.socket))
    try:
        model = make_model(arguments.path, arguments.dtype, arguments.device)
    except Exception as error:
        logger.error("the model cannot be used", exc_info=error)
        told = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        failure = reference_pb2.ReferenceFailure(is_config=isinstance(error, ConfigError), message=told)
        _reply(channel, reference_pb2.ReferenceReply(failure=failure))
        return 1
    hello = reward_pb2.ReferenceInfo(
        path=arguments.path,
        dtype=arguments.dtype,
        digest=model.digest,
        tokenizer_digest=model.tokenizer_digest,
        vocabulary_size=model.vocabulary_size,
        max_sequence_tokens=model.max_sequence_tokens,
    )
    _reply(channel, reference_pb2.ReferenceReply(hello=hello))
    serve(channel, model)
    return 0


def _reply(channel: socket.socket, reply: reference_pb2.ReferenceReply) -> None:
    send_frame(channel, reply.SerializeToString())


if __name__ == "__main__":
    sys.exit(main())
