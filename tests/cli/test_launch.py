"""`whale launch`: what ranks find in their environment, what is shown of what they print, and that they end together, whatever ends them."""

import os
import pathlib
import pty
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from test_cli import WHALE, whale


pytestmark = pytest.mark.alone

# A signal that comes just before a sleep begins is heard when it has ended.
RANK = """import os, sys, time, signal
rank = int(os.environ['RANK'])
def rest():
    while True: time.sleep(0.05)
"""


def launch(*arguments, code=0, env=None, cwd=None):
    """(standard output, standard error)"""
    done = subprocess.run([WHALE, "launch", *map(str, arguments)], capture_output=True, text=True, timeout=60, env=env, cwd=cwd)
    assert done.returncode == code, f"exit {done.returncode}: {done.stderr}{done.stdout[-500:]}"
    return done.stdout, done.stderr


def python(text):
    return ["--", sys.executable, "-c", RANK + text]


def heard():
    """What a shell that started the tests in the background has told them to ignore."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def begun(*arguments, ranks=3, env=None):
    """A launch whose ranks have each printed a line, and these lines."""
    run = subprocess.Popen([WHALE, "launch", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard, env=env,
                           start_new_session=True)
    return run, [run.stdout.readline() for _ in range(ranks)]


@pytest.fixture
def mark():
    """A word in the command line of all processes of a test, none of which is left at its end."""
    word = f"whale-test-{os.getpid()}-{time.monotonic_ns()}"
    yield word
    gone(word)


def alive(word):
    found = []
    for each in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (each / "cmdline").read_bytes():
                found.append(int(each.name))
        except OSError:
            pass
    return found


def gone(word, seconds=5):
    until = time.monotonic() + seconds
    while alive(word):
        assert time.monotonic() < until, f"left over: {[pathlib.Path(f'/proc/{pid}/cmdline').read_bytes() for pid in alive(word)]}"
        time.sleep(0.02)


def test_the_variables():
    out, _ = launch("-n", 3, *python("print(' '.join(os.environ[n] for n in 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT WHALE_JOB_TOKEN'.split()))"))
    rows = sorted(re.sub(r"^\[rank \d\] ", "", line).split() for line in out.splitlines())
    assert [row[:5] for row in rows] == [[str(r), "3", str(r), "3", "127.0.0.1"] for r in range(3)]
    assert len({row[5] for row in rows}) == 1 and 1 <= int(rows[0][5]) <= 65535
    assert len({row[6] for row in rows}) == 1 and re.fullmatch("[0-9a-f]{32}", rows[0][6])
    again, _ = launch("-n", 1, *python("print(os.environ['WHALE_JOB_TOKEN'])"))
    assert again.strip() != rows[0][6]


def test_the_port_is_free_and_can_be_given():
    listen = "import socket; s = socket.create_server(('127.0.0.1', int(os.environ['MASTER_PORT']))); print(s.getsockname()[1])"
    out, _ = launch("-n", 1, *python(listen))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port: {port} cannot be listened to here: Address already in use; give another" in whale("launch", "-n", 1, "--port", port, "--", "true", code=2)
    assert launch("-n", 1, "--port", out.strip(), *python(listen))[0] == out


def test_further_variables():
    env = {**os.environ, "KEPT": "a b", "RANK": "77"}
    out, _ = launch("-n", 1, "--env", "X=1 = 2", "--env=KEPT", "--env", "EMPTY=", *python("print(rank, os.environ['X'], os.environ['KEPT'], repr(os.environ['EMPTY']))"), env=env)
    assert out == "0 1 = 2 a b ''\n"
    assert "'NONE_OF_THEM' is not set here" in launch("-n", 1, "--env", "NONE_OF_THEM", "--", "true", code=2)[1]
    assert "expected NAME=VALUE" in launch("-n", 1, "--env", "a-b=1", "--", "true", code=2)[1]


def test_arguments_arrive_as_they_are():
    words = ["", "--json=", "a b", "'", "--", "$HOME", "-n", "ä\n"]
    assert launch("-n", 1, "--", sys.executable, "-c", "import sys; print(sys.argv[1:])", *words)[0] == f"{words}\n"


@pytest.mark.parametrize("arguments, said", [
    (["-n", 2, "--", "no-such-program"], "cannot start 'no-such-program', which is looked for in PATH: No such file or directory"),
    (["-n", 2, "--", "/no/such"], "cannot start '/no/such': No such file or directory"),
    (["-n", 2, "--", "/etc/passwd"], "cannot start '/etc/passwd': Permission denied"),
    (["-n", 0, "--", "true"], "--processes: '0', expected a whole number from 1"),
    (["-n", -3, "--", "true"], "--processes: '-3', expected a whole number from 1"),
    (["--", "true"], "give -n, the number of processes, or --hosts"),
    (["-n", 2], "needs a program, behind --"),
    (["-n", 2, "--"], "needs a program, behind --"),
    (["-n", 2, "true"], "'true': put the program behind --"),
    (["-n", 2, "--output", "none", "--", "true"], "--output"),
    (["-n", 2, "--grace", -1, "--", "true"], "--grace: '-1', expected a number from 0"),
    (["-n", 2, "--port", 65536, "--", "true"], "--port: '65536', expected"),
    (["-n", 2, "--output-dir", "/proc/x", "--", "true"], "--output-dir: '/proc/x'"),
    (["-n", 2, "--output-dir", "", "--", "true"], "'--output-dir' is followed by nothing"),
    (["-n", 3, "--hosts", "a,b:3", "--", "true"], "--hosts has places for at least 4 ranks, and -n is 3"),
    (["-n", 3, "--hosts", "a:1,b:1", "--", "true"], "--hosts has places for 2 ranks, and -n is 3"),
    (["--hosts", "a,,b", "--", "true"], "--hosts: '' has no name"),
    (["--hosts", "a:0", "--", "true"], "--hosts: 'a:0' does not end in a whole number of ranks"),
    (["--hosts", "a:b", "--", "true"], "--hosts: 'a:b' does not end in a whole number"),
    (["--hosts", "::1", "--", "true"], "(an IPv6 address stands in brackets)"),
    (["--hosts", "[::1", "--", "true"], "lacks a ']'"),
    (["--hosts", "a,a", "--", "true"], "--hosts: 'a' stands there twice"),
    (["--hosts", "-oProxyCommand=x", "--", "true"], "has no name of a host"),
    (["--hosts", "localhost,b", "--", "true"], "give --address, a name of this machine"),
], ids=lambda v: v if isinstance(v, str) else "")
def test_what_cannot_be_started_is_said(arguments, said):
    assert said in launch(*arguments, code=2)[1]


def test_lines_are_whole():
    """From five ranks at once, on both streams, in pieces that end anywhere."""
    text = """
line = f"{rank} " + "x" * (1000 + rank * 777) + " end\\n"
pieces = line * 200
for at in range(0, len(pieces), 1333):
    for fd in (1, 2):
        os.write(fd, pieces[at:at + 1333].encode())
os.write(1, f"{rank} last".encode())
"""
    for stream in launch("-n", 5, *python(text)):
        rows = stream.split("\n")
        for r in range(5):
            prefix = f"[rank {r}] " if r else ""
            assert rows.count(prefix + f"{r} " + "x" * (1000 + r * 777) + " end") == 200
        assert len([row for row in rows if row]) == 5 * 200 + (5 if stream.count("last") else 0)


def test_lines_are_whole_where_both_streams_are_one():
    text = """
for k in range(60):
    os.write(1 + k % 2, (f"<{rank} " + "x" * 9000 + ">\\n").encode())
"""
    done = subprocess.run([WHALE, "launch", "-n", "4", "--output", "all", *python(text)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == sorted(f"<{r} " + "x" * 9000 + ">" for r in range(4) for _ in range(60))


def test_what_rank_0_prints_is_unchanged():
    data = "os.write(1, bytes(range(256)) * 3000); os.write(1, b'no end of line')"
    done = subprocess.run([WHALE, "launch", "-n", "1", *python(data)], capture_output=True, timeout=60)
    assert done.stdout == bytes(range(256)) * 3000 + b"no end of line"


def test_what_is_shown():
    text = python("print('out', rank); print('err', rank, file=sys.stderr)")
    out, err = launch("-n", 3, *text)
    assert sorted(out.splitlines()) == ["[rank 1] out 1", "[rank 2] out 2", "out 0"] and sorted(err.splitlines()) == ["[rank 1] err 1", "[rank 2] err 2", "err 0"]
    out, err = launch("-n", 3, "--output", "all", *text)
    assert sorted(out.splitlines()) == ["out 0", "out 1", "out 2"] and sorted(err.splitlines()) == ["err 0", "err 1", "err 2"]
    out, err = launch("-n", 3, "--output", "first", *text)
    assert out == "out 0\n" and sorted(err.splitlines()) == ["[rank 1] err 1", "[rank 2] err 2", "err 0"]


def test_a_file_for_each_rank(tmp_path):
    text = python("print('out', rank, flush=True); print('err', rank, file=sys.stderr)")
    out, err = launch("-n", 3, "--output", "first", "--output-dir", tmp_path / "a" / "b", *text)
    assert out == "out 0\n" and "[rank 2] err 2" in err
    for r in range(3):
        assert sorted((tmp_path / "a" / "b" / f"rank-{r}.log").read_text().splitlines()) == [f"err {r}", f"out {r}"]


def test_output_that_is_lost_is_no_success(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([WHALE, "launch", "-n", "2", *python("print('x')")], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and "cannot write to the standard output: No space left on device" in done.stderr
    (tmp_path / "rank-1.log").symlink_to("/dev/full")
    assert "the output of rank 1 on" in launch("-n", 2, "--output-dir", tmp_path, *python("print('x')"), code=1)[1]


def test_a_reader_that_is_gone_ends_the_ranks(mark):
    run = subprocess.Popen([WHALE, "launch", "-n", "2", "--grace", "0", *python("\nwhile True: print('x' * 1000)"), mark], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run.stdout.readline()
    run.stdout.close()
    run.stderr.read()
    assert run.wait(30) != 0


def test_ranks_read_nothing():
    done = subprocess.run([WHALE, "launch", "-n", "2", *python("print(repr(sys.stdin.read()))")], input="mine", capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.splitlines()) == ["''", "[rank 1] ''"]


def test_a_rank_that_fails_ends_the_others(mark):
    start = time.monotonic()
    _, said = launch("-n", 3, "--grace", 0.5, *python("sys.exit(7) if rank == 1 else time.sleep(600)"), mark, code=7)
    assert re.search(r"^whale: rank 1 on \S+ ended with status 7; 2 other ranks get SIGTERM in 0.5 seconds$", said, re.M) and time.monotonic() - start < 5
    assert said.count("whale:") == 1


def test_a_rank_that_is_killed_ends_the_others(mark):
    run, lines = begun("-n", 3, "--grace", 0.2, *python("print(os.getpid(), flush=True); time.sleep(600)"), mark)
    pid = next(int(line.split()[-1]) for line in lines if line.startswith("[rank 2]"))
    os.kill(pid, signal.SIGKILL)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 128 + signal.SIGKILL and re.search(r"rank 2 on \S+ died of SIGKILL; 2 other ranks get SIGTERM in 0.2 seconds", said)


def test_others_may_say_what_they_know(mark):
    """Within the grace time; what they end with is not the launch's status."""
    text = "sys.exit(3) if rank == 0 else time.sleep(0.3); print('rank 0 is lost', file=sys.stderr); sys.exit(40 + rank)"
    _, said = launch("-n", 3, "--grace", 20, *python(text), mark, code=3)
    assert "[rank 1] rank 0 is lost" in said and "[rank 2] rank 0 is lost" in said and "rank 2 on" in said and "ended with status 42, after it" in said


def test_who_does_not_hear_sigterm_is_killed(mark):
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(rank, flush=True)\nif rank: time.sleep(0.5); sys.exit(9)\ntime.sleep(600)"
    _, said = launch("-n", 2, "--grace", 0, *python(text), mark, code=9)
    assert "1 other rank gets SIGTERM\n" in said and re.search(r"rank 0 on \S+ has not ended on SIGTERM and is killed", said)


def test_what_a_rank_has_started_ends_with_it(mark):
    text = f"import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', '{mark}']); print('up', flush=True)"
    assert launch("-n", 2, *python(text))[0].count("up") == 2
    gone(mark)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_every_rank_once(mark, number):
    text = f"""
got = []
signal.signal({int(number)}, lambda *_: got.append(1))
print(rank, flush=True)
while not got: time.sleep(0.01)
time.sleep(0.3)
print("got", len(got), flush=True)
sys.exit(5 if rank == 1 else 0)
"""
    run, _ = begun("-n", 3, *python(text), mark)
    os.killpg(run.pid, number)  # as a terminal does
    out, said = run.communicate(timeout=30)
    assert out.count("got 1") == 3 and run.returncode == 128 + number and f"whale: {number.name}, which all ranks got; a second one kills them" in said


def test_at_a_terminal(mark):
    """Rank 0 has it, the others have not; Ctrl-C comes to each once, from the launcher."""
    text = """
got = []
signal.signal(signal.SIGINT, lambda *_: got.append(1))
os.write(1, f"up {rank} {sys.stdin.isatty()} {sys.stdout.isatty()}\\n".encode())  # at once: others write to the same terminal
while not got: time.sleep(0.01)
time.sleep(0.3)
os.write(1, f"got {rank} {len(got)}\\n".encode())
"""
    pid, terminal = pty.fork()
    if pid == 0:
        heard()
        os.execv(WHALE, [WHALE, "launch", "-n", "3", *python(text), mark])
    shown = ""
    while True:
        try:
            part = os.read(terminal, 4096).decode()
        except OSError:  # nobody has the other end any more
            break
        before, shown = shown, shown + part
        if before.count("\n") < 3 <= shown.count("\n"):  # a terminal drops what was not read before
            os.write(terminal, b"\x03")
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    rows = [line.replace("^C", "") for line in shown.replace("\r", "").splitlines()]
    for row in ("up 0 False True", "[rank 1] up 1 False False", "[rank 2] up 2 False False", "got 0 1", "[rank 1] got 1 1", "[rank 2] got 2 1"):
        assert row in rows, shown


def test_ranks_that_end_well_on_a_signal_are_a_success(mark):
    run, _ = begun("-n", 3, *python("signal.signal(15, lambda *_: sys.exit(0)); print(rank, flush=True); rest()"), mark)
    run.terminate()
    run.communicate(timeout=30)
    assert run.returncode == 0


def test_a_rank_that_is_stopped_hears_a_signal_too(mark):
    run, lines = begun("-n", 3, *python("print(os.getpid(), flush=True); time.sleep(600)"), mark)
    os.kill(next(int(line.split()[-1]) for line in lines if line.startswith("[rank 2]")), signal.SIGSTOP)
    run.terminate()
    run.communicate(timeout=8)
    assert run.returncode == 128 + signal.SIGTERM


def test_who_does_not_end_long_after_another_has_on_a_signal_is_killed(mark):
    text = "signal.signal(15, signal.SIG_IGN if rank == 1 else lambda *_: sys.exit(0)); print(rank, flush=True); rest()"
    run, _ = begun("-n", 2, *python(text), mark, ranks=2)
    start = time.monotonic()
    run.terminate()
    _, said = run.communicate(timeout=60)
    assert 29 < time.monotonic() - start < 50 and run.returncode == 128 + signal.SIGTERM
    assert re.search(r"rank 1 on \S+ has not ended on SIGTERM, nor in 30 seconds since another one has, and is killed", said)


def test_a_second_signal_kills(mark):
    run, _ = begun("-n", 3, *python("[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print(rank, flush=True); time.sleep(600)"), mark)
    run.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=10)
    assert run.returncode == 128 + signal.SIGINT


def test_a_signal_ends_a_launch_whose_output_nobody_reads(mark):
    """Ranks that wait for a full pipe, and a launcher that must not, nor keep all that they would print."""
    run = subprocess.Popen([WHALE, "launch", "-n", "2", *python("\nwhile True: os.write(1, b'x' * 50000 + b'\\n')"), mark], stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heard)
    time.sleep(1)
    status = pathlib.Path(f"/proc/{run.pid}/status").read_text()
    assert int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) < 64 << 10
    run.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    run.send_signal(signal.SIGTERM)
    assert run.wait(10) == 128 + signal.SIGTERM
    run.stdout.close()
    run.stderr.close()


def test_ranks_have_the_signals_that_the_launcher_had():
    program = ["grep", "-E", "Sig(Blk|Ign|Cgt)", "/proc/self/status"]
    for preexec in (heard, lambda: [heard(), signal.signal(signal.SIGPIPE, signal.SIG_IGN), signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])]):
        direct, launched = (subprocess.run([*how, *program], capture_output=True, text=True, preexec_fn=preexec, restore_signals=True).stdout
                            for how in ([], [WHALE, "launch", "-n", "1", "--"]))
        assert launched == direct and "SigBlk" in direct


def test_an_ignored_signal_stays_ignored(mark):
    run = subprocess.Popen([WHALE, "launch", "-n", "1", *python("print(signal.getsignal(1) == signal.SIG_IGN, flush=True); time.sleep(600)"), mark], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, preexec_fn=lambda: [heard(), signal.signal(signal.SIGHUP, signal.SIG_IGN)])  # nohup
    assert run.stdout.readline() == "True\n"
    run.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert run.poll() is None
    run.terminate()
    run.communicate(timeout=10)


def test_ranks_do_not_outlive_a_launcher_that_is_killed(mark):
    """Nor what they have started, which ignores every other signal."""
    text = f"""
import subprocess
child = [sys.executable, "-c", "import signal, sys, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; print('up', flush=True); time.sleep(600)", "{mark}"]
subprocess.Popen(child)
time.sleep(600)
"""
    run, _ = begun("-n", 3, *python(text), mark)
    assert len(alive(mark)) == 3 + 3 + 2  # ranks, their children, the launcher and its guard
    run.kill()
    run.communicate(timeout=10)
    gone(mark, 2)


def test_the_rank_ends_even_without_the_guard(mark):
    run, _ = begun("-n", 2, *python("print(os.getpid(), flush=True); time.sleep(600)"), mark, ranks=2)
    for pid in alive(mark):
        if f"/{pathlib.Path(WHALE).name}\0launch".encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    run.communicate(timeout=10)
    gone(mark, 2)


# ---- over ssh ------------------------------------------------------------------------------------------------------

@pytest.fixture
def ssh(tmp_path):
    """An environment whose ssh runs the command on this machine. Hosts called dead do not answer, slow ones not soon."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(f"""#!/bin/bash
printf '%s\\n' "$*" >> {tmp_path}/calls
while [[ $1 == -* ]]; do if [[ $1 == -o ]]; then shift 2; else shift; fi; done
case $1 in
  dead) echo "ssh: connect to host dead port 22: No route to host" >&2; exit 255;;
  slow) exec sleep 600;;
  busy) touch {tmp_path}/coming.$$; ls {tmp_path}/coming.* | wc -l >> {tmp_path}/coming; sleep 0.3; rm {tmp_path}/coming.$$;;
  chatty) echo "Welcome to chatty";;
esac
cd /
export HOST_OF_TEST=$1
shift
exec /bin/sh -c "$*"
""")
    (folder / "ssh").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_hosts(ssh, tmp_path):
    text = python("print(' '.join(os.environ[n] for n in 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT HOST_OF_TEST MINE'.split()), len(os.environ['WHALE_JOB_TOKEN']), os.getcwd(), sys.argv[1:])")
    out, _ = launch("--hosts", "me@a,b:2", "--port", 4321, "--env", "MINE=it's $HOME", "--output", "all", *text, "it's", "$(x)", "a\nb", env=ssh, cwd=tmp_path)
    tail = f"it's $HOME 32 {tmp_path} {['it' + chr(39) + 's', '$(x)', 'a' + chr(10) + 'b']}"
    assert sorted(out.splitlines()) == [f"0 3 0 1 a 4321 me@a {tail}", f"1 3 0 2 a 4321 b {tail}", f"2 3 1 2 a 4321 b {tail}"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3 and all(re.search(r"-o BatchMode=yes .* (me@a|b) exec sh -c 'eval \"\$\(dd bs=1 count=\d+ 2>/dev/null\)\"'$", call) for call in calls)


@pytest.mark.parametrize("hosts, n, expected", [("a,b", 5, "aaabb"), ("a,b,c:1", 6, "aaabbc"), ("a:1,b,c", 4, "abbc"), ("a,b", None, "ab"), ("[a]:2,b", 3, "aab"), ("localhost:2", None, "..")])
def test_ranks_are_even_runs_over_hosts(ssh, hosts, n, expected):
    out, _ = launch(*(["-n", n] if n else []), "--hosts", hosts, "--output", "all", *python("print(rank, os.environ.get('HOST_OF_TEST', '.'), os.environ['MASTER_ADDR'])"), env=ssh)
    rows = [line.split() for line in sorted(out.splitlines())]
    assert "".join(row[1] for row in rows) == expected and {row[2] for row in rows} == {"127.0.0.1" if expected == ".." else "a"}


def test_one_host_meets_on_its_loopback(ssh):
    out, _ = launch("-n", 2, "--hosts", "far", "--output", "first", *python("print(os.environ['MASTER_ADDR'], 20000 <= int(os.environ['MASTER_PORT']) < 30000)"), env=ssh)
    assert out == "127.0.0.1 True\n"
    out, _ = launch("--hosts", "localhost,far", "--address", "10.0.0.1", "--output", "first", *python("print(os.environ['MASTER_ADDR'])"), env=ssh)
    assert out == "10.0.0.1\n"


@pytest.mark.parametrize("hosts", ["localhost:3", "a,b:2"])
def test_the_token_is_on_no_command_line(mark, ssh, tmp_path, hosts):
    run, lines = begun("--hosts", hosts, *python("print(os.environ['WHALE_JOB_TOKEN'], flush=True); time.sleep(600)"), mark, env=ssh)
    token = lines[0].split()[-1]
    assert re.fullmatch("[0-9a-f]{32}", token) and len(alive(mark)) >= 5 and not alive(token)
    assert "localhost" in hosts or token not in (tmp_path / "calls").read_text()  # what ssh was called with
    run.terminate()
    run.communicate(timeout=30)


def test_a_host_that_does_not_answer(mark, ssh):
    _, said = launch("--hosts", "a,dead", *python("time.sleep(600)"), mark, code=255, env=ssh)
    assert "[rank 1] ssh: connect to host dead port 22: No route to host" in said
    assert "rank 1 on dead was not started: the host does not answer to ssh without a password (ssh ended with status 255); 1 other rank gets SIGTERM" in said
    start = time.monotonic()
    _, said = launch("--hosts", "slow,b", "--connect-timeout", 1, *python("time.sleep(600)"), mark, code=255, env=ssh)
    assert "rank 0 on slow was not started: the host has not answered in 1 second;" in said and time.monotonic() - start < 10


def test_a_host_is_not_asked_by_all_ranks_at_once(ssh, tmp_path):
    """sshd drops connections beyond ten that have not got in."""
    out, _ = launch("-n", 20, "--hosts", "busy", "--output", "all", *python("print(rank)"), env=ssh)
    assert sorted(map(int, out.split())) == list(range(20)) and 2 <= max(map(int, (tmp_path / "coming").read_text().split())) <= 8


def test_what_is_missing_on_a_host(mark, ssh, tmp_path):
    _, said = launch("--hosts", "a", "--", "no-such-program", mark, code=127, env=ssh)
    assert "whale: no program 'no-such-program' here" in said and "rank 0 on a was not started" in said
    folder = tmp_path / "only here"
    folder.mkdir()
    ssh["PATH"] = ssh["PATH"].replace(str(tmp_path / "bin"), str(tmp_path / "bin2"))
    (tmp_path / "bin2").mkdir()
    (tmp_path / "bin2" / "ssh").write_text((tmp_path / "bin" / "ssh").read_text().replace("cd /\n", f"rmdir '{folder}'; cd /\n"))
    (tmp_path / "bin2" / "ssh").chmod(0o755)
    _, said = launch("--hosts", "a", "--", "true", mark, code=127, env=ssh, cwd=folder)
    assert "only here" in said and "rank 0 on a was not started" in said


def test_what_a_login_shell_says_is_not_of_the_rank(ssh):
    out, said = launch("--hosts", "chatty", *python("print('mine')"), env=ssh)
    assert out == "mine\n" and "[chatty] Welcome to chatty" in said


def test_ranks_on_hosts_end_together(mark, ssh):
    start = time.monotonic()
    _, said = launch("--hosts", "a,b:2", "--grace", 0.5, *python("sys.exit(7) if rank == 1 else time.sleep(600)"), mark, code=7, env=ssh)
    assert "rank 1 on b ended with status 7; 2 other ranks get SIGTERM in 0.5 seconds" in said and time.monotonic() - start < 8
    run, lines = begun("--hosts", "a,b:2", "--grace", 0.2, *python("print(os.getpid(), flush=True); time.sleep(600)"), mark, env=ssh)
    os.kill(next(int(line.split()[-1]) for line in lines if line.startswith("[rank 2]")), signal.SIGKILL)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 128 + signal.SIGKILL and "rank 2 on b ended with status 137 (SIGKILL)" in said


def test_signals_reach_ranks_on_hosts(mark, ssh):
    text = "signal.signal(2, lambda *_: [print('heard', flush=True), sys.exit(0)]); print(rank, flush=True); rest()"
    run, _ = begun("--hosts", "a,b:2", *python(text), mark, env=ssh)
    os.killpg(run.pid, signal.SIGINT)
    out, _ = run.communicate(timeout=30)
    assert out.count("heard") == 3 and run.returncode == 0


@pytest.mark.parametrize("killed", ["launcher", "launcher after a signal", "ssh"])
def test_ranks_on_hosts_do_not_outlive_what_started_them(mark, ssh, killed, tmp_path):
    """Where ssh is gone the host sees the end of its input. The ranks there are in sessions of their own, as sshd makes them."""
    script = tmp_path / "bin" / "ssh"
    script.write_text(script.read_text().replace("exec /bin/sh -c", "exec python3 " + str(tmp_path / "sshd.py")))
    (tmp_path / "sshd.py").write_text(
        "import os, subprocess, sys\n"
        "there = subprocess.Popen(['/bin/sh', '-c', sys.argv[1]], start_new_session=True)\n"
        "sys.stdin.close(); os.close(0)\n"
        "sys.exit(there.wait() % 256)\n")
    run, _ = begun("--hosts", "a,b:2", "--grace", 0.2, *python("signal.signal(15, signal.SIG_IGN); print(rank, flush=True); time.sleep(600)"), mark, env=ssh)
    if killed != "ssh":
        if "signal" in killed:
            run.terminate()
            time.sleep(0.5)
            assert run.poll() is None
        run.kill()
    else:
        for pid in alive(str(tmp_path / "sshd.py")):
            os.kill(pid, signal.SIGKILL)
    _, said = run.communicate(timeout=30)
    assert killed != "ssh" or "has lost its ssh, which died of SIGKILL" in said
    gone(mark, 3)
