"""The other libraries, each at its fastest documented setting, behind one face."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.library import Rival, into, sync
from bench.state import Trainee

warnings.filterwarnings("ignore", module="torch")
THREADS = 4


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
        into(found, self.trainee.tree())


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
        into(load_file(path), self.trainee.flat())


class Dcp(Rival):
    """``torch.distributed.checkpoint``, synchronous."""

    name = "dcp.save"
    syncs = "data (record and folders not)"
    setting = f"FileSystemWriter, {THREADS} threads, plan cached"

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
    background = True
    shared = False

    def __init__(self, trainee: Trainee) -> None:
        super().__init__(trainee)
        from torch import distributed
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if not distributed.is_initialized():
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
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
    background = True

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


RIVALS: dict[str, type[Rival]] = {
    kind.name: kind
    for kind in (TorchSave, TorchSaveSynced, Safetensors, Dcp, DcpThread, DcpProcess, TorchCheckpointing)
}


def available() -> list[str]:
    """The names of those that are installed here."""
    return [name for name in RIVALS if name != TorchCheckpointing.name or find_spec("torch_checkpointing")]


def facts() -> dict[str, dict[str, str]]:
    """What each library makes durable and hashes, ours first; nothing is measured for it."""
    ours = {
        "syncs": "files, folders, ledger entry",
        "hashes": "SHA-256 a file, XXH3-128 a chunk; checked at every load",
        "setting": "defaults: writer process, 4 threads, O_DIRECT, read back after the commit",
    }
    rivals = {
        name: {"syncs": kind.syncs, "hashes": kind.hashes, "setting": kind.setting} for name, kind in RIVALS.items()
    }
    return {"onward": ours, **rivals}
