"""The other libraries, each at its fastest documented setting, behind one face."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file

from bench.state import Trainee

warnings.filterwarnings("ignore", module="torch")
THREADS = 4


class Rival(ABC):
    """A library that saves and loads the state.

    Attributes:
        name: In the table.
        syncs: Which of its bytes are durable when it says that they are saved.
        hashes: What it could later check the bytes against.
        setting: How it is used.
    """

    name: ClassVar[str]
    syncs: ClassVar[str] = "no"
    hashes: ClassVar[str] = "none"
    setting: ClassVar[str] = ""

    def __init__(self, trainee: Trainee) -> None:
        self.trainee = trainee

    @abstractmethod
    def save(self, path: Path) -> None:
        """Saves; what may go on in the background goes on after this returns."""

    def wait(self) -> None:
        """Returns when the save is over."""

    @property
    def busy(self) -> bool:
        """Whether a save goes on in the background."""
        return False

    def update(self) -> AbstractContextManager[object]:
        """What must be held while the state changes."""
        return nullcontext()

    @abstractmethod
    def load(self, path: Path) -> None:
        """Loads into the live state."""

    def close(self) -> None:
        """Ends what it started."""


class TorchSave(Rival):
    """``torch.save`` of the whole tree into one file."""

    name = "torch.save"
    setting = "one file; read back with mmap"
    synced = False

    def save(self, path: Path) -> None:
        torch.save(self.trainee.tree(), path)
        if self.synced:
            sync(path)

    def load(self, path: Path) -> None:
        found = torch.load(path, mmap=True, weights_only=True)
        _into(found, self.trainee.tree())


class TorchSaveSynced(TorchSave):
    """``torch.save``, made durable."""

    name = "torch.save + fsync"
    syncs = "data"
    synced = True


class Safetensors(Rival):
    """``safetensors.torch.save_file`` of the tensors alone."""

    name = "safetensors"
    setting = "one file, tensors only"

    def save(self, path: Path) -> None:
        save_file(self.trainee.flat(), path)

    def load(self, path: Path) -> None:
        _into(load_file(path), self.trainee.flat())


class Dcp(Rival):
    """``torch.distributed.checkpoint``, synchronous."""

    name = "dcp.save"
    syncs = "data (record and folders not)"
    setting = f"FileSystemWriter(thread_count={THREADS}), plan cached"

    def __init__(self, trainee: Trainee) -> None:
        super().__init__(trainee)
        import torch.distributed.checkpoint as dcp

        self._dcp = dcp

    def save(self, path: Path) -> None:
        self._dcp.save(self.trainee.tree(), storage_writer=self._writer(path), planner=self._planner())

    def load(self, path: Path) -> None:
        self._dcp.load(self.trainee.tree(), storage_reader=self._dcp.FileSystemReader(path))

    def _writer(self, path: Path) -> Any:
        return self._dcp.FileSystemWriter(path, thread_count=THREADS)

    def _planner(self) -> Any:
        return self._dcp.DefaultSavePlanner(enable_plan_caching=True)


class DcpThread(Dcp):
    """``dcp.async_save`` in a thread."""

    name = "dcp.async_save THREAD"
    setting = "DefaultStager kept, staged in the background"
    shared = False

    def __init__(self, trainee: Trainee) -> None:
        super().__init__(trainee)
        from torch import distributed
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if not distributed.is_initialized():
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            store = distributed.FileStore(tempfile.mktemp(prefix="bench-group-"), 1)
            distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        # Pinned memory and non-blocking copies need an accelerator.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.shared,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
        # Kept, because the stager knows its buffers again by the storages of the tensors.
        self._tree = trainee.tree()
        self._staging: Future[None] | None = None
        self._upload: Future[Any] | None = None

    def save(self, path: Path) -> None:
        self.wait()
        answer = self._dcp.async_save(
            self._tree,
            storage_writer=self._writer(path),
            planner=self._planner(),
            async_stager=self._stager,
            async_checkpointer_type=self._kind(),
        )
        self._staging, self._upload = answer.staging_completion, answer.upload_completion

    def wait(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.result()

    @property
    def busy(self) -> bool:
        return self._upload is not None and not self._upload.done()

    def update(self) -> AbstractContextManager[object]:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.result()
        return nullcontext()

    def close(self) -> None:
        self.wait()
        self._stager.close()

    def _kind(self) -> Any:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return AsyncCheckpointerType.PROCESS if self.shared else AsyncCheckpointerType.THREAD


class DcpProcess(DcpThread):
    """``dcp.async_save`` in a process of its own."""

    name = "dcp.async_save PROCESS"
    setting = "DefaultStager kept, shared memory, staged in the background"
    shared = True


class TorchCheckpointing(Rival):
    """Meta's ``torch_checkpointing``, asynchronous."""

    name = "torch_checkpointing"
    setting = f"async, shared memory, use_direct_io=False, {THREADS} threads"

    def __init__(self, trainee: Trainee) -> None:
        super().__init__(trainee)
        import torch_checkpointing as meta
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        saver = AsyncCheckpointSaverConfig(writer_config=meta.CheckpointWriterConfig(file_write_max_threads=THREADS))
        # With direct writes, its default, every save fails on ext4: they are not aligned.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = meta.CheckpointManager(meta.CheckpointManager.Config(save=saver, storage_config=storage))
        self._tree = trainee.tree()
        self._write: Future[Any] | None = None

    def save(self, path: Path) -> None:
        self._write = self._manager.save(str(path), self._tree)

    def wait(self) -> None:
        write, self._write = self._write, None
        if write is not None:
            write.result()

    @property
    def busy(self) -> bool:
        return self._write is not None and not self._write.done()

    def update(self) -> AbstractContextManager[object]:
        lock: AbstractContextManager[object] = self._manager.lock()
        return lock

    def load(self, path: Path) -> None:
        self._manager.load(str(path), into=self._tree)

    def close(self) -> None:
        self._manager.close()


RIVALS: dict[str, Callable[[Trainee], Rival]] = {
    kind.name: kind
    for kind in (TorchSave, TorchSaveSynced, Safetensors, Dcp, DcpThread, DcpProcess, TorchCheckpointing)
}


def available() -> list[str]:
    """The names of those that are installed here."""
    return [name for name in RIVALS if name != TorchCheckpointing.name or find_spec("torch_checkpointing")]


def sync(path: Path) -> None:
    """Makes a file durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Removes what a rival wrote, and lets the filesystem settle."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    os.sync()


def _into(found: Any, live: Any) -> None:
    """Copies loaded values into the live tensors."""
    with torch.no_grad():
        if isinstance(live, torch.Tensor):
            live.copy_(found)
        elif isinstance(live, dict):
            for key, value in live.items():
                _into(found[key], value)
