"""The manifest of docs/many-processes.md, without a cluster: its parts fit each other, and its pods run as an indexed Job starts them, each on a host of its
own (hosts.py) with the variables and the names that Kubernetes gives them, and no others."""

import re

import pytest
from conftest import ROOT, lines, losses, missing, train_program


@pytest.fixture(scope="module")
def manifest():
    """By kind."""
    try:
        import yaml
    except ImportError:
        missing("no yaml here (pip install pyyaml)")
    page = (ROOT / "docs/many-processes.md").read_text()
    parts = list(yaml.safe_load_all(re.search(r"^```yaml\n(.*?)^```", page, re.S | re.M).group(1)))
    assert [part["kind"] for part in parts] == ["Service", "Job"]
    return {part["kind"]: part for part in parts} | {"page": page}


def pod(job):
    return job["spec"]["template"]["spec"]


def variables(job, secrets):
    """What the manifest gives a container."""
    (container,) = pod(job)["containers"]
    given = {}
    for each in container["env"]:
        if "valueFrom" in each:
            of = each["valueFrom"]["secretKeyRef"]
            given[each["name"]] = secrets[of["name"]][of["key"]]
        else:
            assert isinstance(each["value"], str), f"{each['name']}: Kubernetes takes no numbers"
            given[each["name"]] = each["value"]
    return given


def test_its_parts_fit_each_other(manifest):
    service, job = manifest["Service"], manifest["Job"]
    name, spec = job["metadata"]["name"], job["spec"]
    assert (service["apiVersion"], job["apiVersion"]) == ("v1", "batch/v1")
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]  # all at once
    assert spec["backoffLimit"] == 0 and pod(job)["restartPolicy"] == "Never"
    # Pods of an indexed Job have the host name JOB-INDEX, and in the service's domain a name in its DNS; also while they are not ready.
    assert str(service["spec"]["clusterIP"]) == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}  # a label that the Job gives its pods
    assert pod(job)["subdomain"] == service["metadata"]["name"]
    given = variables(job, {"train-token": {"token": "t"}})
    assert given["MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}" and given["WORLD_SIZE"] == str(spec["completions"])
    assert "kubectl create secret generic train-token --from-literal=token=$(openssl rand -hex 16)" in manifest["page"]


def test_its_pods_train_what_one_process_trains(manifest, network, tmp_path, alone):
    job = manifest["Job"]
    n, name, domain = job["spec"]["completions"], job["metadata"]["name"], pod(job)["subdomain"]
    assert n == len(network.hosts)
    network.names([f"{name}-{index}.{domain}" for index in range(n)], tmp_path / "hosts")
    train_program(tmp_path)
    given = variables(job, {"train-token": {"token": "0123456789abcdef"}})
    command = pod(job)["containers"][0]["command"]
    pods = [network.start(index, *command, cwd=tmp_path, env={**given, "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{name}-{index}", "PATH": "/usr/bin:/bin"})
            for index in range(n)]
    told = [(*each.communicate(timeout=120), each.returncode) for each in pods]
    assert [code for _, _, code in told] == [0] * n, told
    assert losses(told[0][0]) == alone(n) and {of for _, _, of in lines(told[0][0])} == {str(n)}
