"""whale.ray where there is no Ray; with one: tests/launchers/test_ray.py."""

import subprocess
import sys


def python(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_whale_does_not_import_ray():
    assert python("import sys, whale; assert 'ray' not in sys.modules").returncode == 0


def test_without_ray_the_error_says_what_to_install():
    done = python("import sys; sys.modules['ray'] = None\nimport whale.ray")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("ImportError: whale.ray needs Ray (") and "pip install ray" in done.stderr
