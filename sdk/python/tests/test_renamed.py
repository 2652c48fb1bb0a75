"""Old names (docs/words.md) are refused, and the new ones are said."""

import copy
import pickle

import pytest

import whale as wh


def classifier():
    with wh.Graph("classifier") as g:
        x, y = wh.input("x", (12, 6)), wh.input("y", (12,), wh.int32)
        with wh.replica():
            loss = wh.nn.cross_entropy(wh.nn.linear(wh.ops.relu(wh.nn.linear(x, 16)), 3), y)
        g.minimize(loss, wh.SGD(0.1))
    return g


def inside(call):
    with wh.Graph("renamed"):
        return call()


@pytest.mark.parametrize("call,said", [
    (lambda: inside(lambda: wh.replica(2, layout="row")), r"replica\(\) has no argument 'layout'; it is called 'device_order' now"),
    (lambda: inside(lambda: wh.cluster(layout="row")), r"cluster\(\) .*'layout'.*'device_order' now"),
    (lambda: inside(lambda: wh.pipeline(2, chunks=2)), r"pipeline\(\) .*'chunks'.*'virtual_stages' now"),
    (lambda: wh.SGD(0.1, split=True), r"SGD\(\) .*'split'.*'split_master_weights' now"),
    (lambda: wh.Adam(0.1, lazy=True), r"Adam\(\) .*'lazy'.*'sparse_updates' now"),
    (lambda: wh.Adafactor(schedule=wh.cosine(10)), r"Adafactor\(\) .*'schedule'.*'lr_schedule' now")])
def test_arguments(call, said):
    with pytest.raises(TypeError, match=said):
        call()


def test_other_unknown_arguments_are_python_s_errors():
    with pytest.raises(TypeError, match="unexpected keyword argument 'order'"):
        inside(lambda: wh.replica(2, order="row"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentun'"):
        wh.SGD(0.1, momentun=0.9)


def test_attributes():
    with pytest.raises(AttributeError, match="'Schedule'; it is called 'LRSchedule' now"):
        wh.Schedule
    with pytest.raises(AttributeError, match="'schedules'$"):
        wh.schedules
    with pytest.raises(ImportError, match="cannot import name 'Schedule' from 'whale'; it is called 'LRSchedule' now"):
        from whale import Schedule  # noqa: F401
    with pytest.raises(ImportError, match="^cannot import name 'schedules' from 'whale' "):
        from whale import schedules  # noqa: F401
    assert not hasattr(wh, "Schedule")
    for name, now in {"lazy": "sparse_updates", "split": "split_master_weights", "schedule": "lr_schedule"}.items():
        with pytest.raises(AttributeError, match=f"'{name}'; it is called '{now}' now"):
            getattr(wh.SGD(0.1), name)
    with pytest.raises(AttributeError, match="'bridges'; it is called 'reshards' now"):
        wh.plan(classifier(), devices="null:2").bridges()


def test_keys_of_reports():
    plan = wh.plan(classifier(), devices="null:2", strategy="replica")
    entry = plan.to_dict()["entries"][0]
    for report, name, now in ((entry["timeline"], "streams", "queues"), (entry["programs"][0]["buffers"][0], "slots", "versions"),
                              (classifier().to_dict()["training"], "schedule", "lr_schedule"), (classifier().to_dict()["scopes"][0], "chunks", "virtual_stages"),
                              (plan.choices()["variables"][0], "layout", "sharding")):
        with pytest.raises(KeyError, match=f"{name}: it is called .*{now}"):
            report[name]
    with pytest.raises(KeyError, match="^'other'$"):
        entry["other"]


def test_optimizers_are_values_as_before():
    optimizer = wh.AdamW(1e-3, sparse_updates=True, lr_schedule=wh.cosine(10))
    assert copy.deepcopy(optimizer) == optimizer == pickle.loads(pickle.dumps(optimizer))
