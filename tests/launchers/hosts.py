"""Hosts on one machine: network, IPC, process, host name and mount namespaces of their own, on a bridge that can be cut. Needs root."""

import pathlib
import subprocess
import sys

from conftest import environment

SPACES = ["net", "ipc", "pid", "uts", "mount"]


def ip(*arguments, inside):
    subprocess.run(["nsenter", f"--target={inside}", "--net", *map(str, arguments)], check=True, capture_output=True, text=True)


class Namespaces:
    """Namespaces and the process that keeps them: nothing outlives it, neither processes nor links."""

    def __init__(self, *kinds):
        # The first process of its process namespace; ends with this program, too.
        self._keeper = subprocess.Popen(["unshare", *[f"--{kind}" for kind in kinds], "--fork", "--kill-child", *(["--mount-proc"] if "pid" in kinds else []),
                                         "sh", "-c", "echo up; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._keeper.stdout.readline() == "up\n"
        self.pid = int(pathlib.Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children").read_text())

    def end(self):
        self._keeper.stdin.close()
        try:
            self._keeper.wait(5)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._keeper.stdout.close()


class Network:
    """Hosts node0, node1, ... with the addresses 10.77.0.1, ... on one bridge."""

    def __init__(self, n):
        self.hosts, self._started = [], []
        self._switch = Namespaces("net")
        ip("ip", "link", "add", "bridge0", "type", "bridge", inside=self._switch.pid)
        ip("ip", "link", "add", "bridge1", "type", "bridge", inside=self._switch.pid)  # of the other side of a partition
        for bridge in ("bridge0", "bridge1"):
            ip("ip", "link", "set", bridge, "up", inside=self._switch.pid)
        for host in range(n):
            self.hosts.append(Namespaces(*SPACES))
            inside = self.hosts[-1].pid
            ip("ip", "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", inside, inside=self._switch.pid)
            ip("ip", "link", "set", f"port{host}", "master", "bridge0", "up", inside=self._switch.pid)
            ip("ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0", inside=inside)
            for link in ("lo", "eth0"):
                ip("ip", "link", "set", link, "up", inside=inside)
            subprocess.run(["nsenter", f"--target={inside}", "--uts", "hostname", f"node{host}"], check=True)

    @staticmethod
    def address(host):
        return f"10.77.0.{host + 1}"

    def end(self):
        for process in self._started:
            process.kill()
        for each in (*self.hosts, self._switch):
            each.end()
        for process in self._started:
            process.communicate()

    def start(self, host, *command, env, cwd=None):
        enter = ["nsenter", f"--target={self.hosts[host].pid}", *[f"--{kind}" for kind in SPACES], *([f"--wd={cwd}"] if cwd else [])]
        process = subprocess.Popen([*enter, *command], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._started.append(process)
        return process

    def job(self, program, **more):
        """A rank on each host: python -c program. With no shared memory between them, as there is none between machines."""
        ranks = dict(WORLD_SIZE=str(len(self.hosts)), MASTER_ADDR=self.address(0), MASTER_PORT="29500", WHALE_JOB_TOKEN="secret", UCX_TLS="tcp,self", **more)
        return [self.start(host, sys.executable, "-c", program, env=environment(RANK=str(host), **ranks)) for host in range(len(self.hosts))]

    def names(self, names, file):
        """From now on host n is known by names[n], everywhere, and takes itself for the first part of it. `file` is written."""
        file.write_text("127.0.0.1 localhost\n" + "".join(f"{self.address(host)} {name}\n" for host, name in enumerate(names)))
        for host, name in enumerate(names):
            inside = f"--target={self.hosts[host].pid}"
            subprocess.run(["nsenter", inside, "--uts", "hostname", name.split(".")[0]], check=True)
            subprocess.run(["nsenter", inside, "--mount", "mount", "--bind", file, "/etc/hosts"], check=True)

    def link(self, host, state):
        """Of the host: "up" or "down"."""
        ip("ip", "link", "set", "eth0", state, inside=self.hosts[host].pid)

    def part(self, hosts):
        """From now on these hosts reach each other only, and the others each other only."""
        for host in hosts:
            ip("ip", "link", "set", f"port{host}", "master", "bridge1", inside=self._switch.pid)

    def separate(self, one, other):
        """These two do not reach each other any more; all others reach both. No host hears of it."""
        for host, to in ((one, other), (other, one)):
            ip("ip", "neighbour", "replace", self.address(to), "lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "eth0", inside=self.hosts[host].pid)

    def shape(self, rate):
        """What each host sends and receives, such as "100mbit"; None: as fast as it goes."""
        for host, space in enumerate(self.hosts):
            for device, inside in (("eth0", space.pid), (f"port{host}", self._switch.pid)):
                if rate:
                    ip("tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms", inside=inside)
                else:
                    subprocess.run(["nsenter", f"--target={inside}", "--net", "tc", "qdisc", "del", "dev", device, "root"], capture_output=True)
