"""Weights from a trainer on the same machine, through files in memory; vLLM's ways need GPUs.

The trainer writes tensors into a safetensors file below ``/dev/shm`` and sends its path.  Workers
copy what they need before they answer, so the file may be removed then.
"""

from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from attnres_serve.compat import tensor_file
from attnres_serve.compat.renewal import Update
from attnres_serve.errors import SettingError


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The first message of a trainer.

    Attributes:
        partial: whether tensors that the next update does not send stay unchanged.
    """

    partial: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A piece of an update.

    Attributes:
        path: of a safetensors file that every worker can read.
    """

    path: str


class SharedMemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's interface of a transfer; the worker sets ``update`` at its start."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    partial = False
    update: Update | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if type(init_info.partial) is not bool:
            raise SettingError(f"partial is {init_info.partial!r}; it is true or false.")
        self.partial = init_info.partial

    def start_weight_update(self) -> None:
        """Do nothing: old weights stay until all new ones have arrived."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        assert self.update is not None, "vLLM sends no piece before a start"
        for name, tensor in tensor_file.tensors_of(update_info.path):
            self.update.take(name, tensor)

    def finish_weight_update(self) -> None:
        assert self.update is not None, "vLLM sends no end before a start"
        try:
            self.update.apply()
        finally:
            self.partial = False  # it holds for one update

    def shutdown(self) -> None:
        self.partial = False
