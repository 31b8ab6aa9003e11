"""A store on a disk, without a model: what comes back, what goes wrong, and what is left behind."""

import errno
import gc
import os
import re
import resource
import signal
import threading
import warnings

import pytest
import torch

from planner.errors import OffloadError, PlanWarning
from planner.offload import disk
from planner.offload.disk import Disk
from planner.offload.layout import ALIGNMENT, Stay, lay_out, rounded
from planner.offload.links import measured_disk
from planner.offload.threads import STAGING
from planner.offload.transfers import begin, enter, fetch, free, open_frames, ready, send


def there_and_back(number, tensors):
    """Tensors that left, as they came back."""
    rooms = [rounded(t.untyped_storage().nbytes()) for t in tensors]
    ticket = begin(number, sum(rooms))
    for v, t in enumerate(tensors):
        send(ticket, t, v, sum(rooms[:v]), rooms[v])
    for v, t in enumerate(tensors):
        free(ticket, t, v)
    coming = [fetch(ticket, v) for v in range(len(tensors))]
    return [ready(ticket, t, v) for v, t in enumerate(coming)]


@pytest.mark.parametrize("direct", [True, False])
def test_tensors_come_back_as_they_were(tmp_path, direct, monkeypatch):
    if not direct:
        monkeypatch.setattr(disk, "_DIRECT", 0)
    tensors = [
        torch.randn(STAGING // 4 + 5),  # more than one buffer
        torch.randn(7, 5).t(),
        torch.arange(3),
        torch.randn(4, 6)[:, ::2],
        torch.tensor(2.0, dtype=torch.bfloat16),
        torch.zeros(2, 2, dtype=torch.complex64),
        torch.ones(9, dtype=torch.bool),
    ]
    store = Disk(str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        back = there_and_back(enter(store), tensors)
    for before, after in zip(tensors, back, strict=True):
        assert torch.equal(before, after)
        assert (before.stride(), before.dtype) == (after.stride(), after.dtype)
    assert os.listdir(tmp_path) == []  # the file has no name


def test_calls_that_wait_have_room_each_and_give_it_back(tmp_path):
    store = Disk(str(tmp_path), most=2 * ALIGNMENT)
    number = enter(store)
    first, second = begin(number, 10), begin(number, 10)
    for ticket, x in ((first, 1.0), (second, 2.0)):
        send(ticket, torch.full((2,), x), 0, 0, ALIGNMENT)
        free(ticket, None, 0)
    assert [ready(t, fetch(t, 0), 0).tolist() for t in (first, second)] == [[1.0, 1.0], [2.0, 2.0]]
    with pytest.raises(OffloadError, match=r"host_gb= allows 8\.00 kB"):
        begin(number, 10)
    del first  # as a step that fails lets go of it, its copies done or not
    third = begin(number, 10)
    assert store._file.size == 2 * ALIGNMENT
    del second, third, ticket
    assert open_frames() == 0


def test_an_extent_returns_once_its_copies_have_ended(tmp_path, monkeypatch):
    store = Disk(str(tmp_path))
    number, go = enter(store), threading.Event()
    write = disk._File.write
    monkeypatch.setattr(disk._File, "write", lambda *given: go.wait() and write(*given))
    ticket = begin(number, 10)
    send(ticket, torch.ones(2), 0, 0, ALIGNMENT)
    del ticket  # the step failed, and the thread writes yet
    other = begin(number, 10)
    assert store._file.size == 2 * ALIGNMENT
    go.set()
    send(other, torch.ones(2), 0, 0, ALIGNMENT)
    free(other, None, 0)
    begin(number, 10)
    assert store._file.size == 2 * ALIGNMENT


def test_a_full_disk_is_told_where_it_is_waited_for_and_the_next_copy_works(tmp_path, monkeypatch):
    number = enter(store := Disk(str(tmp_path)))

    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OffloadError, match=f"{tmp_path}: writing 8 bytes failed.*No space.*offload_dir="):
            there_and_back(number, [torch.ones(2)])
        gc.collect()
        assert open_frames() == 0
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OffloadError, match=r"taking 8\.00 kB failed.*free room there"):
            begin(number, 2 * ALIGNMENT)
    assert torch.equal(there_and_back(number, [torch.ones(3)])[0], torch.ones(3))
    assert store._file.size == ALIGNMENT  # the room of the copy that failed


def test_without_direct_writes_the_page_cache_is_used_and_it_is_said_once(tmp_path, monkeypatch):
    write, refused = os.pwrite, []

    def pwrite(*given):
        if not refused:
            refused.append(1)
            raise OSError(errno.EINVAL, "no direct I/O here")
        return write(*given)

    monkeypatch.setattr(os, "pwrite", pwrite)
    opened = disk._opened
    monkeypatch.setattr(disk, "_opened", lambda folder: (opened(folder)[0], True))
    number = enter(store := Disk(str(tmp_path)))
    with pytest.warns(PlanWarning, match=f"{tmp_path} has no direct I/O"):
        assert torch.equal(there_and_back(number, [torch.ones(3)])[0], torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(there_and_back(number, [torch.ones(3)])[0], torch.ones(3))
    assert store._file.size == ALIGNMENT


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system in memory")
def test_a_folder_in_memory_is_said_to_save_nothing(monkeypatch):
    monkeypatch.setattr(disk, "_warned", set())
    with pytest.warns(PlanWarning, match=r"/dev/shm is in memory \(tmpfs\): .* takes what it saves.*offload_dir="):
        there_and_back(enter(store := Disk("/dev/shm")), [torch.ones(3)])
    assert store._file.size == ALIGNMENT


def test_a_disk_is_measured_under_another_default_device(tmp_path):
    with torch.device("meta"):
        assert min(measured_disk.__wrapped__(str(tmp_path))) >= 0


def test_a_folder_that_is_not_there_is_named(tmp_path):
    number = enter(store := Disk(str(tmp_path / "no")))
    with pytest.raises(OffloadError, match=r"no: making a file failed.*make the folder"):
        begin(number, 10)
    del store
    with pytest.raises(OffloadError, match="not that of a plan that is applied"):
        begin(number, 10)


def opened_in(folder):
    """The files there that this process has open, those without a name, too."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [target for link in links if os.path.islink(link) and (target := os.readlink(link)).startswith(str(folder))]


def test_nothing_is_left_of_a_store(tmp_path):
    before = set(threading.enumerate())
    store = Disk(str(tmp_path))
    there_and_back(enter(store), [torch.ones(3)])
    assert len(opened_in(tmp_path)) == 1
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del store
    gc.collect()
    for thread in started:
        thread.join(10)
    assert set(threading.enumerate()) <= before
    assert not opened_in(tmp_path)


def in_a_fork(run):
    """What a function returns in a child of this process."""
    read, write = os.pipe()
    if not (child := os.fork()):
        signal.alarm(20)  # a child that waits for ever
        try:
            os.write(write, repr(run()).encode())
        except BaseException as e:
            os.write(write, f"{type(e).__name__}: {e}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as told:
        return told.read()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_a_file_and_threads_of_its_own(tmp_path):
    number = enter(store := Disk(str(tmp_path)))
    ticket, x = begin(number, ALIGNMENT), torch.ones(3)
    send(ticket, x, 0, 0, ALIGNMENT)
    free(ticket, x, 0)

    def train():
        return [there_and_back(number, [torch.full((3,), value)])[0].tolist() for value in (2.0, 3.0)]

    assert in_a_fork(train) == "[[2.0, 2.0, 2.0], [3.0, 3.0, 3.0]]"
    assert "was forked (os.fork, a worker) between a forward pass" in in_a_fork(lambda: fetch(ticket, 0))
    assert ready(ticket, fetch(ticket, 0), 0).tolist() == [1.0, 1.0, 1.0]
    assert train()[1] == [3.0, 3.0, 3.0]
    assert store._file.size == 2 * ALIGNMENT


def test_a_thread_that_cannot_start_is_told_and_tried_again(tmp_path, monkeypatch):
    number = enter(store := Disk(str(tmp_path)))

    def refused(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(OffloadError, match="no thread, or no memory"):
            there_and_back(number, [torch.ones(3)])
    assert torch.equal(there_and_back(number, [torch.ones(3)])[0], torch.ones(3))
    assert store._file.size == ALIGNMENT


def test_a_limit_of_file_sizes_is_named(tmp_path):
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * ALIGNMENT, 2 * ALIGNMENT))
        begin(enter(store), 3 * ALIGNMENT)

    store = Disk(str(tmp_path))
    assert re.search("taking 12.00 kB failed .*too large.*ulimit -f", in_a_fork(limited))
    assert os.listdir(tmp_path) == []


def test_values_that_meet_lie_apart_and_others_share_room():
    stays = [Stay(10_000, 0, 5), Stay(10_000, 2, 3), Stay(5_000, 4, 9), Stay(20_000, 6, 9), Stay(3, 6, 6)]
    offsets, nbytes = lay_out(stays)
    for i, a in enumerate(stays):
        assert offsets[i] % ALIGNMENT == 0
        for j, b in enumerate(stays[:i]):
            if a.begin <= b.end and b.begin <= a.end:
                assert offsets[i] >= offsets[j] + b.nbytes or offsets[j] >= offsets[i] + a.nbytes
    assert nbytes < sum(rounded(s.nbytes) for s in stays)
