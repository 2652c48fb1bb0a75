"""What plans and jobs say of themselves: ports, variables, entries, devices, memory."""

import dataclasses
import json

import numpy as np
import pytest

import whale as wh
from test_worlds import X, Y, graph


def start(**options):
    return wh.plan(graph(), devices="cpu:1,cpu:1|cpu-2GB:1", strategy="replica", zero=1, eval_batches=[3], **options)


def test_devices_and_their_memory():
    plan = start()
    assert plan.devices() == [wh.Device("cpu", 0, 0, 0, 0), wh.Device("cpu", 0, 1, 1, 0), wh.Device("cpu", 1, 2, 0, 2 * 10 ** 9)]
    kinds = {"ref:1": "ref", "null:1": "null", "lag:1": "lag", "lag_cpu:1": "lag_cpu", "cpu:1": "cpu"}
    assert {devices: wh.plan(graph(), devices=devices).devices()[0].kind for devices in kinds} == kinds
    told = plan.memory(0)
    weights = sum(int(np.prod(dims)) for dims in ((5, 8), (8,), (8, 3), (3,)))
    assert told.parameters == 4 * weights and 0 < told.state < 8 * weights and told.total > told.parameters + told.state
    assert told.total == sum(getattr(told, each.name) for each in dataclasses.fields(told) if each.name not in ("host", "total"))
    with pytest.raises(wh.InvalidArgument, match="'device' is 3; the plan is for 3 devices"):
        plan.memory(3)
    with pytest.raises(wh.InvalidArgument, match="'device' is -1"):
        plan.memory(-1)
    with plan.start() as job:
        job.step(x=X[0], y=Y[0])
        for device, row in enumerate(job.report()["devices"]):  # JSON says the same
            bytes_of = dataclasses.asdict(job.memory(device))
            assert bytes_of["parameters"] == 4 * weights and bytes_of["workspace"] >= 0
            assert {name: value for name, value in row["bytes"].items() if name in bytes_of} == {name: bytes_of[name] for name in row["bytes"] if name in bytes_of}
            assert len(set(row["bytes"]) & set(bytes_of)) > 4
        with pytest.raises(wh.InvalidArgument, match="device 3"):
            job.memory(3)


def test_ports():
    with start().start() as job:
        assert job.inputs() == [wh.Port("x", wh.float32, (12, 5), 0, True, True), wh.Port("y", wh.int32, (12,), 0, True, True)]
        assert {port.name: (port.dtype, port.dims, port.batch_dim) for port in job.outputs()} == {
            "loss": (wh.float32, (), -1), "logits": (wh.float32, (12, 3), -1)}
    with wh.Graph("forward") as g:
        g.output("y", wh.input("x", (2, 4), batch_dim=1) * 2)
    with wh.plan(g).start() as job:
        assert job.inputs() == [wh.Port("x", wh.float32, (2, 4), 1, False, True)]
        assert [(port.in_train, port.in_eval) for port in job.outputs()] == [(False, True)]


def test_variables():
    from whale import _library
    with start().start() as job:
        rows = job.variables()
        said = json.loads(_library.take_text(_library.lib.whale_session_variables_json, job._handle.pointer))
        assert [(v.name, v.role, v.dtype, list(v.dims), [list(copy) for copy in v.copies]) for v in rows] == [
            (v["name"], v["role"], wh.dtypes.as_dtype(v["dtype"]), v["dims"], v["copies"]) for v in said]
        assert {v.role for v in rows} == {"parameter", "state"}
        weight = next(v for v in rows if v.role == "parameter")
        assert weight.copies == ((0,), (1,), (2,)) and weight["copies"] is weight.copies
        assert next(v for v in rows if v.role == "state").copies == ((0, 1, 2),)
        with pytest.raises(dataclasses.FrozenInstanceError):
            weight.name = "other"


def test_entries():
    plan = start()
    assert plan.entries() == [wh.Entry("train", 12, False), wh.Entry("eval", 12, False), wh.Entry("eval", 3, False)]
    with plan.start() as job:
        job.prepare(train_batches=[5])
        assert job.entries() == [*plan.entries(), wh.Entry("train", 5, True)]


def test_a_variable_is_a_row_of_a_table_too():
    with start().start() as job:
        first = job.variables()[0]
        assert first["name"] == first.name and first["dtype"] == first.dtype.name == "float32"
        assert list(dict(first)) == ["name", "role", "dtype", "dims", "copies"]
        with pytest.raises(KeyError):
            first["shape"]
