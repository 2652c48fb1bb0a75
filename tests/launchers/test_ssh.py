"""Launchers that reach other hosts by ssh, with a real sshd on each: the commands of docs/many-processes.md for node1 and node2, as printed."""

import os
import re
import subprocess
import time

import pytest
from conftest import MPI, ROOT, environment, lines, losses, needs, train_program

PAGE = (ROOT / "docs/many-processes.md").read_text()

SERVER = """
Port 22
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
"""


@pytest.fixture
def node1(network, tmp_path):
    """Runs a command in a shell on node1, which gets into node2 by ssh; what it prints."""
    needs("sshd", "ssh", "ssh-keygen", package="openssh-server openssh-client")
    network.names([f"node{host + 1}" for host in range(4)], tmp_path / "hosts")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / key)], check=True)
    (tmp_path / "sshd_config").write_text(SERVER.format(folder=tmp_path))
    (tmp_path / "ssh_config").write_text(f"IdentityFile {tmp_path}/user\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel ERROR\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path}/ssh_config "$@"\n')  # instead of ~/.ssh/config
    (tmp_path / "bin/ssh").chmod(0o755)
    made = not os.path.exists("/run/sshd")  # which sshd wants, and a start of the system makes
    os.makedirs("/run/sshd", exist_ok=True)
    for host in range(2):
        network.start(host, "/usr/sbin/sshd", "-D", "-e", "-f", str(tmp_path / "sshd_config"), env=environment())
    train_program(tmp_path)

    def on(command, **more):
        process = network.start(0, "bash", "-euo", "pipefail", "-c", command, cwd=tmp_path, env=environment(tmp_path / "bin", **more))
        return (*process.communicate(timeout=120), process.returncode)

    until = time.monotonic() + 20
    while on("ssh node2 true")[2] != 0:
        assert time.monotonic() < until, on("ssh -v node2 true")
    yield on
    if made:
        os.rmdir("/run/sshd")


def test_ssh_gets_to_another_host(node1):
    assert node1("hostname; ssh node2 hostname") == ("node1\nnode2\n", "", 0)


COMMANDS = re.findall(r"^(whale launch .*--hosts .*?-- \./train)", PAGE, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_whale_launch(node1, command, alone):
    out, err, code = node1(command)
    assert code == 0 and losses(out) == alone(8) and {of for _, _, of in lines(out)} == {"8"}, err


def test_the_page_has_such_commands():
    assert len(COMMANDS) == 3


def test_mpirun(node1, alone):
    needs("mpirun", package="openmpi-bin")
    block = re.search(r"```bash\n([^`]*^mpirun .*--host node1.*\n)```", PAGE, re.M).group(1)
    command = "\n".join(line for line in block.splitlines() if not line.startswith("mpirun -n 4 "))  # which is of one host
    out, err, code = node1(command, **MPI)
    assert code == 0 and losses(out) == alone(8) and {of for _, _, of in lines(out)} == {"8"}, err


def test_mpirun_says_by_pmix_where_rank_0_is(node1, alone):
    needs("mpirun", package="openmpi-bin")
    command = re.search(r"```bash\n(mpirun .*--host node1.* \./train)\n", PAGE).group(1)
    assert "MASTER_ADDR" not in command
    without = '; for v in $(env | sed -n "s/^\\(OMPI_[^=]*\\)=.*/\\1/p"); do unset $v; done; exec ./train'
    for each in (command, command.replace("./train", "sh -c 'true" + without + "'")):  # and by it alone, as prterun
        out, err, code = node1(each, **MPI)
        assert code == 0 and losses(out) == alone(8) and {of for _, _, of in lines(out)} == {"8"}, err
