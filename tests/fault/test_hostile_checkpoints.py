"""Hostile checkpoints that agree with themselves up to the ledger entry: refused by name, the one before is used."""

from __future__ import annotations

import pytest

from onward.errors import IncompatibleState
from onward.format.digests import sha256
from onward.upkeep.verify import verify
from recorder import resumed
from support import RUN, content, key, place_of

from .forging import Edit, Plain, forge
from .judging import FOLDER, INDEX, NUMBER, RECORD, SHARD, STATE, bounded, good, judge


def test_a_forgery_without_a_lie_is_accepted() -> None:
    """The control: what is refused below is refused for the lie, not for the forging."""
    store = forge(good(), FOLDER, NUMBER, {"record": lambda r: None, "index": lambda i: None})
    begun, part = resumed(store)
    assert begun.next_step == 20
    assert part.bytes() == content(20)
    assert verify(place_of(store, FOLDER), None, run=RUN, threads=1).ok


def piece(index: Plain, name: str) -> Plain:
    return next(p for p in index["files"][0]["pieces"] if p["tensor"] == key(name))


def _changed(name: str, **values: object) -> Edit:
    return lambda index: piece(index, name).update(values)


INDEX_LIES: dict[str, Edit] = {
    "past the end of the file": lambda i: piece(i, "weight").update(start=i["files"][0]["size"] - 8),
    "inside the header": _changed("weight", start=16),
    "a negative start": _changed("weight", start=-400),
    "a huge start": _changed("weight", start=2**62),
    "too few bytes": _changed("weight", nbytes=8),
    "negative bytes": _changed("weight", nbytes=-384),
    "a negative offset": _changed("weight", offset=[-1, 0]),
    "beyond the tensor": _changed("weight", offset=[1, 0]),
    "a box of other dimensions": _changed("weight", offset=[0], shape=[96]),
    "overlapping pieces": lambda i: piece(i, "codes").update(start=piece(i, "weight")["start"]),
    "an unknown tensor": _changed("weight", tensor='["nobody"]'),
    "bytes for a tied tensor": _changed("weight", tensor=key("head")),
    "no piece for a tensor": lambda i: i["files"][0]["pieces"].remove(piece(i, "weight")),
    "no piece for an empty tensor": lambda i: i["files"][0]["pieces"].remove(piece(i, "empty")),
    "a piece twice": lambda i: i["files"][0]["pieces"].append(piece(i, "weight")),
    "no digest": _changed("weight", digests=[]),
    "a digest too many": lambda i: piece(i, "weight")["digests"].append("0" * 32),
    "a digest for an empty tensor": _changed("empty", digests=["0" * 32]),
    "another digest": _changed("weight", digests=["0" * 32]),
    "a digest of another spelling": lambda i: piece(i, "weight").update(
        digests=[piece(i, "weight")["digests"][0] + " "]
    ),
    "a header of another size": lambda i: i["files"][0].update(header_bytes=8),
    "a huge header": lambda i: i["files"][0].update(header_bytes=2**60),
    "another header digest": lambda i: i["files"][0].update(header_xxh3="0" * 32),
    "another file size": lambda i: i["files"][0].update(size=2**40),
    "another file": lambda i: i["files"][0].update(path="001.safetensors"),
    "no file": lambda i: i.update(files=[]),
    "a file twice": lambda i: i["files"].append(i["files"][0]),
    "the index of another rank": lambda i: i.update(rank=1),
    "other chunks": lambda i: i.update(chunk_bytes=1),
}


@pytest.mark.parametrize("lie", INDEX_LIES)
def test_a_lying_index_is_refused(lie: str) -> None:
    judge(forge(good(), FOLDER, NUMBER, {"index": INDEX_LIES[lie]}), INDEX, SHARD)


def tensor(layout: Plain, name: str) -> Plain:
    return next(t for t in layout["tensors"] if t["key"] == key(name))


LAYOUT_LIES: dict[str, Edit] = {
    "another shape of the same size": lambda t: tensor(t, "weight").update(shape=[8, 12]),
    "a larger tensor": lambda t: tensor(t, "weight").update(shape=[13, 8]),
    "a tensor without bytes": lambda t: t["tensors"].append({**tensor(t, "codes"), "key": '["part","zzz"]'}),
    "a tensor left out": lambda t: t["tensors"].remove(tensor(t, "codes")),
    "a tie in place of the bytes": lambda t: tensor(t, "weight").update(tie=key("head")),
}


@pytest.mark.parametrize("lie", LAYOUT_LIES)
def test_a_lying_layout_is_refused(lie: str) -> None:
    judge(forge(good(), FOLDER, NUMBER, {"layout": LAYOUT_LIES[lie]}), "layout.json", INDEX, SHARD)


def test_a_layout_that_calls_a_tensor_another_type_of_the_same_size_is_refused() -> None:
    """The load finds first that it does not fit the live state; verification finds that the shard says otherwise."""
    as_signed = {"layout": lambda t: tensor(t, "codes").update(dtype="int8", stored="I8")}
    store = forge(good(), FOLDER, NUMBER, as_signed)
    report = verify(place_of(store, FOLDER), None, run=RUN, threads=1)
    assert SHARD in {finding.file for finding in report.findings}
    with pytest.raises(IncompatibleState, match="codes"):
        resumed(store)


STATE_LIES: dict[str, Edit] = {
    "a component left out": lambda s: s["components"].pop("part"),
    "an unknown tensor": lambda s: s["components"]["part"].update(weight={"$tensor": '["nobody"]'}),
    "a tensor that is a number": lambda s: s["components"]["part"].update(weight={"$tensor": 7}),
    "an unknown tag": lambda s: s["components"]["part"].update(weight={"$pickle": "gASV"}),
    "a callable": lambda s: s["components"]["part"].update(note={"$call": ["os.system", "true"]}),
    "an array that is not its tensor": lambda s: s["components"]["part"].update(
        note={"$ndarray": {"tensor": key("weight"), "dtype": "<i8"}}
    ),
    "an inline tensor of a huge shape": lambda s: s["components"]["own"].update(
        rank={"$torch.tensor": {"dtype": "float32", "shape": [2**40], "base64": ""}}
    ),
    "deep nesting": lambda s: s["components"]["part"].update(note=_deep(400)),
    "the state of another rank": lambda s: s.update(rank=1),
}


def _deep(depth: int) -> object:
    tree: object = 1
    for _ in range(depth):
        tree = [tree]
    return tree


@pytest.mark.parametrize("lie", STATE_LIES)
def test_a_lying_state_is_refused_at_load(lie: str) -> None:
    """What a state says is a matter for the one who loads it; nothing live was touched, and the file is named."""
    store = forge(good(), FOLDER, NUMBER, {"state": STATE_LIES[lie]})
    with bounded():
        begun, part = resumed(store)
    assert begun.next_step == 10
    assert part.bytes() == content(10)
    told = [finding for rejection in begun.rejected for finding in rejection.reasons]
    assert {finding.file for finding in told} == {STATE}, told


RECORD_LIES: dict[str, Edit] = {
    "another step": lambda r: r.update(step=21),
    "another rank": lambda r: r.update(rank=1, world_size=2),
    "another world": lambda r: r.update(world_size=4),
    "another attempt": lambda r: r.update(attempt="0" * 32),
    "another run": lambda r: r.update(run="other"),
    "another layout": lambda r: r.update(layout_sha256="0" * 64),
    "a file left out": lambda r: r.update(files=[f for f in r["files"] if f["path"] != "000.safetensors"]),
    "a file that is not there": lambda r: r["files"].append({"path": "001.safetensors", "size": 1, "sha256": "0" * 64}),
    "a file of another size": lambda r: r["files"][0].update(size=2**50),
    "a file with another digest": lambda r: r["files"][0].update(sha256="0" * 64),
    "no components": lambda r: r.update(components=[]),
    "a component of another step": lambda r: r["components"][0].update(step=19),
}


@pytest.mark.parametrize("lie", RECORD_LIES)
def test_a_lying_record_is_refused(lie: str) -> None:
    judge(
        forge(good(), FOLDER, NUMBER, {"record": RECORD_LIES[lie]}),
        RECORD,
        "manifest.json",
        "manifest.sha256",
        INDEX,
        SHARD,
    )


SUMS_LIES: dict[str, Edit] = {
    "a file left out": lambda s: s.pop(STATE),
    "the manifest left out": lambda s: s.pop("manifest.json"),
    "another digest of the manifest": lambda s: s.update({"manifest.json": "0" * 64}),
    "another digest of a shard": lambda s: s.update({SHARD: "0" * 64}),
    "a file that is not there": lambda s: s.update({"ghost": "0" * 64}),
    "a rank whose number is no number": lambda s: s.update({"rank-\u00b2/000.safetensors": "0" * 64}),
    "a rank whose number is huge": lambda s: s.update({f"rank-{'9' * 200}/000.safetensors": "0" * 64}),
    "itself": lambda s: s.update({"manifest.sha256": "0" * 64}),
}


@pytest.mark.parametrize("lie", SUMS_LIES)
def test_a_lying_checksum_list_is_refused(lie: str) -> None:
    extra = ("ghost", "rank-\u00b2/000.safetensors", f"rank-{'9' * 200}/000.safetensors")
    judge(forge(good(), FOLDER, NUMBER, {"sums": SUMS_LIES[lie]}), "manifest.sha256", STATE, SHARD, *extra)


MANIFEST_LIES: dict[str, Edit] = {
    "another step": lambda m: m.update(global_step=21),
    "two ranks": lambda m: m.update(world_size=2, expected_ranks=2, actual_ranks=2),
    "a record elsewhere": lambda m: m["ranks"][0].update(path="assets/vocab.txt"),
    "another record": lambda m: m["ranks"][0].update(sha256=sha256(b"")),
    "another layout": lambda m: m.update(layout_sha256="0" * 64),
    "another attempt": lambda m: m.update(attempt="0" * 32),
    "no components": lambda m: m.update(components=[]),
    "an asset that is not there": lambda m: m["assets"].append({"path": "assets/x", "size": 0, "sha256": sha256(b"")}),
    "an asset of another size": lambda m: m["assets"][0].update(size=10**6),
}


@pytest.mark.parametrize("lie", MANIFEST_LIES)
def test_a_lying_manifest_is_refused(lie: str) -> None:
    judge(
        forge(good(), FOLDER, NUMBER, {"manifest": MANIFEST_LIES[lie]}),
        *("manifest.json", "manifest.sha256", "layout.json", RECORD, "assets/x", "assets/vocab.txt"),
    )
