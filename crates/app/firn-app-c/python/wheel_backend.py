"""Builds the wheel of this package (PEP 517). The package is one file of Python, so that a wheel is an archive of it and of
what describes it: no other build tool is needed.

    python3 -m pip wheel --no-deps .        or        python3 -c 'import wheel_backend; wheel_backend.build_wheel(".")'
"""
import base64
import hashlib
import pathlib
import re
import zipfile

HERE = pathlib.Path(__file__).resolve().parent


def read_project():
    """The fields of pyproject.toml that a wheel has."""
    text = (HERE / "pyproject.toml").read_text()
    return {key: re.search(rf'^{key} = "(.*)"$', text, re.M)[1] for key in ("name", "version", "description", "requires-python")}


def describe(project):
    fields = {"Metadata-Version": "2.1", "Name": project["name"], "Version": project["version"],
              "Summary": project["description"], "License": "Apache-2.0", "Requires-Python": project["requires-python"],
              "Description-Content-Type": "text/markdown"}
    head = "".join(f"{name}: {value}\n" for name, value in fields.items())
    return head + "\n" + (HERE / "README.md").read_text()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    project = read_project()
    stem = f"{project['name']}-{project['version']}"
    info = f"{stem}.dist-info"
    files = {
        "firnapp.py": (HERE / "firnapp.py").read_text(),
        f"{info}/METADATA": describe(project),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: firnapp\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    wheel = f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def build_sdist(sdist_directory, config_settings=None):
    raise NotImplementedError("only wheels are built")
