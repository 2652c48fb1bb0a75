"""`whale run --data` and every other reader: what a file is, is found by its content; what cannot be read is an error."""

import bz2
import gzip
import io
import json
import lzma
import os
import socket
import struct
import subprocess
import tarfile
import zipfile
import zlib

import numpy as np
import pytest
from test_cli import WHALE, files, lines, whale  # noqa: F401

TEXT = "It was the best of times, it was the worst of times. " * 50


def arrays():
    rng = np.random.default_rng(0)
    return dict(x=rng.standard_normal((23, 8)).astype(np.float32), y=rng.integers(0, 3, 23).astype(np.int32))


def run(model, data, code=0):
    done = subprocess.run([WHALE, "run", str(model), "--steps", "2", "--json", "--data", str(data)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, f"exit {done.returncode}: {done.stderr}"
    return done.stdout if code == 0 else done.stderr


def npz(**members):
    out = io.BytesIO()
    np.savez(out, **members)
    return out.getvalue()


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def packed(name, content):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr(name, content)
    return out.getvalue()


def tar(content):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        info = tarfile.TarInfo("book.txt")
        info.size = len(content)
        file.addfile(info, io.BytesIO(content))
    return out.getvalue()


def test_arrays_are_known_by_content(files, tmp_path):
    want = run(files / "mlp.whale", files / "data.npz")
    losses = [row["loss"] for row in lines(want)]
    for name, content in (("DATA.NPZ", npz(**arrays())), ("data", npz(**arrays())), ("data.txt", npz(**arrays())),
                          ("data.bin", (files / "data.safetensors").read_bytes())):
        (tmp_path / name).write_bytes(content)
        assert [row["loss"] for row in lines(run(files / "mlp.whale", tmp_path / name))] == losses, name


def test_npy_feeds_the_only_input(tmp_path):
    import whale as wh
    g = wh.Graph("one")
    with g:
        x = wh.input("x", (4, 8))
        g.minimize(wh.nn.linear(x, 1).square().mean() if hasattr(x, "square") else wh.nn.mse(wh.nn.linear(x, 8), x), wh.SGD(0.01))
    g.save(str(tmp_path / "one.whale"))
    (tmp_path / "x.npy").write_bytes(npy(arrays()["x"]))
    (tmp_path / "x.npz").write_bytes(npz(x=arrays()["x"]))
    losses = [[row["loss"] for row in lines(run(tmp_path / "one.whale", tmp_path / name))] for name in ("x.npy", "x.npz")]
    assert losses[0] == losses[1]


REFUSED = [  # name, content, what the message says
    ("x.npy", npy(arrays()["x"]), "one array, and this model has 2 inputs"),
    ("book.txt.gz", gzip.compress(TEXT.encode()), "gunzip"),
    ("book.txt", gzip.compress(TEXT.encode()), "gunzip"),
    ("book.bz2", bz2.compress(TEXT.encode()), "bunzip2"),
    ("book.xz", lzma.compress(TEXT.encode()), "unxz"),
    ("book.tar", tar(TEXT.encode()), "tar archive"),
    ("utf16.txt", TEXT.encode("utf-16"), "iconv -f UTF-16"),
    ("utf16be.txt", b"\xfe\xff" + TEXT.encode("utf-16-be"), "iconv -f UTF-16"),
    ("utf32.txt", TEXT.encode("utf-32"), "iconv -f UTF-32"),
    ("utf16-no-mark.txt", TEXT.encode("utf-16-le"), "neither text nor a file of arrays (byte 0 at position 1)"),
    ("noise.bin", bytes(range(256)) * 8, "neither text"),
    ("data.h5", b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
    ("data.parquet", b"PAR1" + bytes(100), "Parquet"),
    ("empty.txt", b"", "is empty"),
    ("empty.npz", b"", "is empty"),
    ("text.npz", TEXT.encode(), "does not hold what its name says"),
    ("text.NPY", TEXT.encode(), "does not hold what its name says"),
    ("text.safetensors", TEXT.encode(), "does not hold what its name says"),
    ("word.zip", packed("word/document.xml", "x"), "not of arrays: it holds 'word/document.xml'"),
    ("model.pt", packed("archive/data.pkl", "x"), "PyTorch"),
    ("big.npz", npz(x=arrays()["x"].astype(">f4"), y=arrays()["y"]), "big-endian"),
    ("fortran.npz", npz(x=np.asfortranarray(arrays()["x"]), y=arrays()["y"]), "ascontiguousarray"),
    ("double.npz", npz(x=arrays()["x"].astype(np.float64), y=arrays()["y"]), "is float64, the input takes float32; save x.astype(numpy.float32)"),
    ("ids.npz", npz(x=arrays()["x"], y=arrays()["y"].astype(np.int64) + 2**32), "as element 0 (counted from 0, in order); the input takes int32"),
    ("labels.npz", npz(x=arrays()["x"], y=arrays()["y"] + 0.5), "is float64, the input takes int32: save whole numbers"),
    ("complex.npz", npz(x=arrays()["x"].astype(np.complex64), y=arrays()["y"]), "'<c8'"),
    ("record.npz", npz(x=np.zeros(23, [("a", "<f4")]), y=arrays()["y"]), "no input takes"),
    ("names.npz", npz(a=arrays()["x"], y=arrays()["y"]), "no array named like input 'x'; it has a, y"),
    ("shape.npz", npz(x=arrays()["x"][:, :7].copy(), y=arrays()["y"]), "has shape [23, 7], the input takes [10, 8]"),
    ("rows.npz", npz(x=arrays()["x"], y=arrays()["y"][:9].copy()), "9 samples"),
    ("huge.npz", npz(**arrays()).replace(b"(23, 8)", b"(4611686018427387904, 8)"[:7]), "damaged"),
]


def test_integers_of_another_width_are_the_same_numbers(files, tmp_path):
    (tmp_path / "wide.npz").write_bytes(npz(x=arrays()["x"], y=arrays()["y"].astype(np.int64)))
    (tmp_path / "same.npz").write_bytes(npz(**arrays()))
    wide, same = (run(files / "mlp.whale", tmp_path / name).splitlines() for name in ("wide.npz", "same.npz"))
    assert [json.loads(line)["loss"] for line in wide] == [json.loads(line)["loss"] for line in same]


@pytest.mark.parametrize("name,content,word", REFUSED, ids=[row[0] for row in REFUSED])
def test_what_is_not_read_is_refused_by_name(files, tmp_path, name, content, word):
    (tmp_path / name).write_bytes(content)
    for model in ("mlp.whale", "gpt.whale"):
        if model == "mlp.whale" or name.startswith(("book", "utf", "noise", "empty", "text")):
            message = run(files / model, tmp_path / name, code=2)
            assert word in message and name in message, message


def test_a_changed_or_cut_file_of_arrays_is_an_error(files, tmp_path):
    good = npz(**arrays())
    at = good.index(arrays()["x"].tobytes()[:16])
    bad = bytearray(good)
    bad[at + 5] ^= 1
    (tmp_path / "flip.npz").write_bytes(bad)
    assert "array 'x' changed since it was written" in run(files / "mlp.whale", tmp_path / "flip.npz", code=2)
    safe = (files / "data.safetensors").read_bytes()
    single = npy(arrays()["x"])
    for name, content in (("cut.npz", good), ("cut.safetensors", safe), ("cut.npy", single)):
        for n in range(1, len(content), 1 + len(content) // 25):
            (tmp_path / name).write_bytes(content[:n])
            message = run(files / "mlp.whale", tmp_path / name, code=2)
            assert name in message and "stoll" not in message and "basic_string" not in message, message
    for shape in (b"(9223372036854775807,)", b"(99999999999999999999,)", b"(-4, -8)", b"(4294967296, 4294967296)", b"((2,), 3)"):
        head = b"{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + b", }"
        head += b" " * (117 - len(head)) + b"\n"
        content = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(64)
        (tmp_path / "shape.npz").write_bytes(packed("x.npy", content))
        message = run(files / "mlp.whale", tmp_path / "shape.npz", code=2)
        assert "shape" in message, message
    for dims in ([2**62, 4], [-1, 8], [2**32, 2**32]):
        header = b'{"x":{"dtype":"F32","shape":%s,"data_offsets":[0,64]}}' % str(dims).encode()
        (tmp_path / "s.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
        assert "needs others" in run(files / "mlp.whale", tmp_path / "s.safetensors", code=2)


def test_an_array_that_is_there_twice_is_an_error(files, tmp_path):
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as file, pytest.warns(UserWarning, match="Duplicate"):
        for name in "x", "y", "y":
            file.writestr(name + ".npy", npy(arrays()[name]))
    assert "holds array 'y' twice" in run(files / "mlp.whale", tmp_path / "d.npz", 2)


OTHERS = {"note": np.array(["mine", "too"]), "objects": np.array([{}, None], dtype=object), "number": np.complex64(1), "columns": np.asfortranarray(np.ones((3, 4))),
          "turned": np.ones(3, ">f4"), "records": np.zeros(3, [("a", "<f4"), ("b", "<i4", (2,))]), "days": np.zeros(2, "datetime64[D]"), "empty": np.array("")}


@pytest.mark.parametrize("name", OTHERS)
def test_arrays_that_are_no_input_are_left_alone(files, tmp_path, name):
    (tmp_path / "alone.npz").write_bytes(npz(**arrays()))
    (tmp_path / "both.npz").write_bytes(npz(**{name: OTHERS[name]}, **arrays()))
    alone, both = ([row["loss"] for row in lines(run(files / "mlp.whale", tmp_path / file))] for file in ("alone.npz", "both.npz"))
    assert alone == both
    (tmp_path / "fed.npz").write_bytes(npz(x=OTHERS[name], y=arrays()["y"]))
    assert "array 'x'" in run(files / "mlp.whale", tmp_path / "fed.npz", 2)


def zip64(**members):
    """As writers do that do not wait for 4 GiB: all ones in the directory, the numbers in extra fields and in an end of its own."""
    body, directory = b"", b""
    for name, array in members.items():
        content, name = npy(array), f"{name}.npy".encode()
        rest = struct.pack("<HHHHHI", 45, 0, 0, 0, 0x21, zlib.crc32(content))
        directory += b"PK\1\2" + struct.pack("<H", 45) + rest + struct.pack("<IIHHHHHII", 2**32 - 1, 2**32 - 1, len(name), 34, 0, 0, 0, 0, 2**32 - 1) + name
        directory += struct.pack("<HHH", 0x7875, 2, 7) + struct.pack("<HHQQQ", 1, 24, len(content), len(content), len(body))
        body += b"PK\3\4" + rest + struct.pack("<IIHH", 2**32 - 1, 2**32 - 1, len(name), 20) + name + struct.pack("<HHQQ", 1, 16, len(content), len(content)) + content
    end = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, len(members), len(members), len(directory), len(body))
    end += b"PK\6\7" + struct.pack("<IQI", 0, len(body) + len(directory), 1)
    return body + directory + end + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1, 0)


def test_zip64_is_read(files, tmp_path):
    (tmp_path / "plain.npz").write_bytes(npz(**arrays()))
    (tmp_path / "wide.npz").write_bytes(zip64(**arrays()))
    assert set(np.load(tmp_path / "wide.npz")) == {"x", "y"}  # as numpy reads it
    losses = lambda name: [row["loss"] for row in lines(run(files / "mlp.whale", tmp_path / name))]
    assert losses("wide.npz") == losses("plain.npz")
    good = zip64(**arrays())
    for n in range(1, len(good), 1 + len(good) // 40):
        (tmp_path / "cut.npz").write_bytes(good[:n])
        assert "cut.npz" in run(files / "mlp.whale", tmp_path / "cut.npz", code=2)
    for at in range(len(good) - 160, len(good)):  # numbers of the directory and of its end
        bad = bytearray(good)
        bad[at] ^= 0x81
        (tmp_path / "cut.npz").write_bytes(bad)
        done = subprocess.run([WHALE, "run", str(files / "mlp.whale"), "--steps", "1", "--json", "--data", str(tmp_path / "cut.npz")], capture_output=True, text=True)
        assert done.returncode in (0, 2), done.stderr


def test_a_read_that_fails_is_an_error(files, tmp_path):
    for command in (["run", files / "gpt.whale", "--data", "/proc/self/mem"], ["inspect", "/proc/self/mem"], ["plan", "/proc/self/mem"]):
        assert "/proc/self/mem': Input/output error" in whale(*command, code=2)


@pytest.fixture
def odd(tmp_path):
    """What is no regular file."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    here = os.getcwd()
    os.chdir(tmp_path)  # a socket's path is short
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("socket")
    os.chdir(here)
    yield {"a pipe": tmp_path / "pipe", "a directory": tmp_path / "folder", "a socket": tmp_path / "socket", "a device": "/dev/zero"}
    listening.close()


def test_no_reader_waits_for_what_is_no_file(files, odd, tmp_path):
    import whale as wh
    for word, path in odd.items():
        for command in (["run", files / "gpt.whale", "--data", path], ["bench", files / "gpt.whale", "--data", path],
                        ["run", path], ["plan", path], ["verify", path], ["run", files / "gpt.whale", "--steps", "1", "--trace", path]):
            done = subprocess.run([WHALE, *map(str, command)], capture_output=True, text=True, timeout=60)
            assert done.returncode == 2 and word in done.stderr and str(path) in done.stderr, (command, done.stderr)
        if word != "a directory":
            for command in (["inspect", path], ["run", files / "gpt.whale", "--load", path], ["run", files / "gpt.whale", "--steps", "1", "--save", path]):
                done = subprocess.run([WHALE, *map(str, command)], capture_output=True, text=True, timeout=60)
                assert done.returncode == 2 and str(path) in done.stderr, (command, done.stderr)
        for read in (wh.load, wh.Plan.load, lambda p: wh.plan(wh.load(str(files / "mlp.whale")), devices=f"file:{p}")):
            with pytest.raises(wh.WhaleError, match=word):
                read(str(path))


def entry(begin, end, shape=(8, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


# header, bytes of data: "w" is [8, 8] of F32, 256 bytes
NO_SAFETENSORS = {"overlap": ({"w": entry(0, 256), "v": entry(128, 384)}, 384), "the same bytes twice": ({"w": entry(0, 256), "v": entry(0, 256)}, 256),
                  "a hole": ({"w": entry(0, 256), "v": entry(260, 516)}, 516), "a hole before": ({"w": entry(4, 260)}, 260),
                  "trailing bytes": ({"w": entry(0, 256)}, 260), "cut": ({"w": entry(0, 256)}, 252), "other size": ({"w": entry(0, 252)}, 252),
                  "backwards": ({"w": entry(256, 0)}, 256), "no dtype": ({"w": {"shape": [8, 8], "data_offsets": [0, 256]}}, 256),
                  "a name twice": (f'{{"w": {json.dumps(entry(0, 256))}, "w": {json.dumps(entry(0, 256))}}}', 256),
                  "a name twice of no bytes": (f'{{"v": {json.dumps(entry(0, 0, (0,)))}, "w": {json.dumps(entry(0, 256))}, "v": {json.dumps(entry(0, 0, (0,)))}}}', 256),
                  "negative": ({"w": entry(0, 256, (-8, -8))}, 256), "a list": ([], 0), "an unknown dtype": ({"w": entry(0, 256, dtype="F31")}, 256)}


@pytest.mark.parametrize("name", NO_SAFETENSORS)
def test_every_reader_of_safetensors_refuses_the_same(tmp_path, name):
    """`--data`, initial values and checkpoints."""
    import whale as wh
    header, size = NO_SAFETENSORS[name]
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    bad, good = tmp_path / "bad.safetensors", tmp_path / "good.safetensors"
    bad.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    text = json.dumps({"w": entry(0, 256)}).encode()
    good.write_bytes(len(text).to_bytes(8, "little") + text + bytes(256))
    g = wh.Graph("one")
    with g:
        w = wh.input("w", (8, 8))
        g.minimize(wh.nn.mse(wh.nn.linear(w, 8, bias=False), w), wh.SGD(0.01))
    g.save(str(tmp_path / "fed.whale"))
    assert lines(run(tmp_path / "fed.whale", good))
    if name == "an unknown dtype":  # of another array it is no matter
        both = json.dumps({"w": entry(0, 256), "v": entry(256, 320, dtype="F31")}).encode()
        (tmp_path / "both").write_bytes(len(both).to_bytes(8, "little") + both + bytes(320))
        assert lines(run(tmp_path / "fed.whale", tmp_path / "both"))
    assert "bad.safetensors" in run(tmp_path / "fed.whale", bad, code=2)
    for file, code in ((good, 0), (bad, 2)):
        g = wh.Graph("one")
        with g:
            x = wh.input("x", (8, 8))
            g.minimize(wh.nn.mse(x @ wh.parameter("w", (8, 8), wh.from_file(str(file), "w")), x), wh.SGD(0.01))
        g.save(str(tmp_path / "from.whale"))
        said = whale("run", tmp_path / "from.whale", "--steps", "1", "--quiet", "--devices", "ref:1", code=code)
        assert code == 0 or "bad.safetensors" in said
    whale("run", tmp_path / "fed.whale", "--steps", "1", "--quiet", "--save", tmp_path / "c")
    (tmp_path / "c" / "model.safetensors").write_bytes(bad.read_bytes())
    assert "model.safetensors" in whale("run", tmp_path / "fed.whale", "--steps", "1", "--load", tmp_path / "c", code=2)


def test_text_for_a_model_of_fewer_bytes_says_what_it_must_take(files, tmp_path):
    """The model may be of `whale model` or of another program."""
    whale("model", "gpt", "--layers", "1", "--dim", "8", "--heads", "2", "--seq", "4", "--batch", "2", "--vocab", "11", "-o", tmp_path / "gpt.whale")
    message = run(tmp_path / "gpt.whale", files / "book.txt", code=2)
    assert "takes values below 11: for text it must take values below 256; with `whale model`: --vocab 256" in message


def test_text_is_utf8(files, tmp_path):
    good = TEXT + "Grüße, 鯨 🐋. "
    (tmp_path / "good.txt").write_text("\ufeff" + good, encoding="utf-8")
    run(files / "gpt.whale", tmp_path / "good.txt")
    for bad, at in ((b"ab\xff\xfe", 2), (b"Gr\xfc\xdfe", 2), (b"\xc0\xaf", 0), (b"\xed\xa0\x80", 0), (b"\xf4\x90\x80\x80", 0), (b"\xe0\x80\x80", 0), (b"\x80", 0), ("鯨".encode()[:2], 0)):
        (tmp_path / "bad.txt").write_bytes(good.encode() + bad)
        said = run(files / "gpt.whale", tmp_path / "bad.txt", code=2)
        assert f"byte {bad[at]} at position {len(good.encode()) + at}" in said and "iconv" in said, said
