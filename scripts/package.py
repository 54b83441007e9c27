"""Writes the parts of a binary release that need no compilation; called by scripts/package.sh.

    package.py licenses TARGET FILE              # texts of the licenses of all dependencies
    package.py archive TARGET BINARY OUT         # archive, SBOM and checksums

TARGET is a Rust target. BINARY is the program, or a wheel that contains it. Needs Cargo, and the sources of the dependencies.
"""

import datetime
import hashlib
import html
import io
import json
import os
import re
import stat
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import uuid
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CRATE = ROOT / "crates/moe-analyze"
LICENSES = CRATE / "THIRD-PARTY-LICENSES.txt"
LICENSE_FILE = re.compile(r"(un)?licen[cs]e|copying|copyright|notice", re.IGNORECASE)


def output(*command):
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


class Dependencies:
    """The packages that are linked into the program, by (name, version)."""

    def __init__(self, target):
        tree = ["tree", "--locked", "--package", "moe-analyze", "--edges", "normal", "--target", target, "--prefix", "none", "--format", "{p}"]
        names = {tuple(line.split(" ")[:2]) for line in output("cargo", *tree).decode().splitlines() if line}
        names = {(name, version.removeprefix("v")) for name, version in names}
        metadata = json.loads(output("cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target))
        self.packages = {key: p for p in metadata["packages"] if (key := (p["name"], p["version"])) in names}
        missing = names - self.packages.keys()
        assert not missing, missing
        key_of = {p["id"]: key for key, p in self.packages.items()}
        self.edges = {
            key_of[node["id"]]: sorted({key_of[d["pkg"]] for d in node["deps"] if d["pkg"] in key_of and any(k["kind"] is None for k in d["dep_kinds"])})
            for node in metadata["resolve"]["nodes"]
            if node["id"] in key_of
        }
        lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
        self.checksums = {(p["name"], p["version"]): p.get("checksum") for p in lock["package"]}
        self.version = next(version for name, version in self.packages if name == "moe-analyze")

    def external(self):
        return {key: p for key, p in sorted(self.packages.items()) if p["source"]}


def expression(package):
    """The SPDX expression of a package."""
    if not package["license"]:
        sys.exit(f"{package['name']} {package['version']} has no license expression")
    return package["license"].replace("/", " OR ")


def licenses(target, path):
    dependencies = Dependencies(target)
    parts = ["Licenses of the software that is linked into moe-analyze.\n"]
    users = {}
    for (name, version), package in dependencies.external().items():
        source = Path(package["manifest_path"]).parent
        files = [f for f in sorted(source.rglob("*")) if LICENSE_FILE.match(f.name) and f.is_file() and f.suffix not in (".rs", ".py", ".json", ".toml")]
        texts = {f.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n").strip() for f in files}
        for text in texts:
            users.setdefault(text, []).append(f"{name} {version}")
        parts.append(f"{name} {version}: {expression(package)}{'' if texts else ' (the package contains no license text)'}")
    for text, names in sorted(users.items(), key=lambda item: item[1]):
        parts.append(f"\n{'=' * 80}\n{', '.join(names)}\n{'-' * 80}\n\n{text}")
    sysroot = Path(output("rustc", "--print", "sysroot").decode().strip())
    library = sysroot / "share/doc/rust/COPYRIGHT-library.html"
    if library.exists():
        text = html.unescape(re.sub(r"<style.*?</style>|<[^>]+>", "", library.read_text(encoding="utf-8"), flags=re.DOTALL))
        parts.append(f"\n{'=' * 80}\nRust standard library\n{'-' * 80}\n\n" + re.sub(r"\n\s*\n+", "\n\n", text).strip())
    else:
        print(f"{library} is missing: the licenses of the Rust standard library are omitted", file=sys.stderr)
    Path(path).write_text("\n".join(parts) + "\n", encoding="utf-8", newline="\n")


def purl(key):
    return f"pkg:cargo/{key[0]}@{key[1].replace('+', '%2B')}"


def sbom(dependencies, target, time):
    """CycloneDX 1.5, the same bytes for the same sources."""
    components = []
    for key, package in sorted(dependencies.packages.items()):
        component = {
            "type": "application" if key[0] == "moe-analyze" else "library",
            "bom-ref": purl(key),
            "name": key[0],
            "version": key[1],
            "purl": purl(key),
            "licenses": [{"expression": expression(package)}],
        }
        if checksum := dependencies.checksums.get(key):
            component["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        components.append(component)
    main = next(c for c in components if c["name"] == "moe-analyze")
    components.remove(main)
    main["properties"] = [{"name": "target", "value": target}]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"timestamp": datetime.datetime.fromtimestamp(time, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "component": main},
        "components": components,
        "dependencies": [{"ref": purl(key), "dependsOn": [purl(d) for d in edges]} for key, edges in sorted(dependencies.edges.items())],
    }
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document))}"
    return json.dumps(document, indent=1).encode() + b"\n"


def program_of(path):
    """The bytes of the program in a wheel, or of the file itself."""
    if path.suffix != ".whl":
        return path.read_bytes()
    with zipfile.ZipFile(path) as wheel:
        [name] = [n for n in wheel.namelist() if re.fullmatch(r"[^/]+\.data/scripts/moe-analyze(\.exe)?", n)]
        return wheel.read(name)


def archive(target, binary, out):
    out = Path(out)
    time = int(os.environ.get("SOURCE_DATE_EPOCH") or output("git", "log", "-1", "--format=%ct"))
    dependencies = Dependencies(target)
    name = f"moe-analyze-{dependencies.version}-{target}"
    is_windows = "windows" in target
    program = program_of(Path(binary))
    with tempfile.TemporaryDirectory() as directory:
        executable = Path(directory) / ("moe-analyze.exe" if is_windows else "moe-analyze")
        executable.write_bytes(program)
        executable.chmod(0o755)

        def printed(*args):
            return output(str(executable), *args).replace(b"\r\n", b"\n")

        doc = "share/doc/moe-analyze"
        bom = sbom(dependencies, target, time)
        files = {
            f"bin/{executable.name}": program,
            f"{doc}/README.md": (ROOT / "README.md").read_bytes(),
            f"{doc}/CHANGELOG.md": (ROOT / "CHANGELOG.md").read_bytes(),
            f"{doc}/LICENSE-APACHE": (ROOT / "LICENSE-APACHE").read_bytes(),
            f"{doc}/LICENSE-MIT": (ROOT / "LICENSE-MIT").read_bytes(),
            f"{doc}/{LICENSES.name}": LICENSES.read_bytes(),
            f"{doc}/sbom.cdx.json": bom,
            "share/bash-completion/completions/moe-analyze": printed("completions", "bash"),
            "share/zsh/site-functions/_moe-analyze": printed("completions", "zsh"),
            "share/fish/vendor_completions.d/moe-analyze.fish": printed("completions", "fish"),
            "share/man/man1/moe-analyze.1": printed("man"),
        }
        commands = printed("--help").decode().split("Commands:\n")[1].split("\n\n")[0]
        for command in re.findall(r"^  (\w[\w-]*)", commands, re.MULTILINE):
            if command != "help":
                files[f"share/man/man1/moe-analyze-{command}.1"] = printed("man", command)
    for old in out.glob("moe-analyze-*"):
        old.unlink()
    if is_windows:
        write_zip(out / f"{name}.zip", name, files, time)
    else:
        write_tar(out / f"{name}.tar.xz", name, files, time)
    (out / f"{name}.cdx.json").write_bytes(bom)
    packages = sorted(path for path in out.iterdir() if path.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in packages]
    (out / "SHA256SUMS").write_text("".join(sums), newline="\n")
    for path in packages:
        print(f"{path.stat().st_size:>10} bytes  {path.name}")


def mode_of(path):
    return 0o755 if path.startswith("bin/") else 0o644


def write_tar(path, name, files, time):
    with tarfile.open(path, "w:xz", format=tarfile.PAX_FORMAT, preset=9) as tar:
        for file, data in sorted(files.items()):
            info = tarfile.TarInfo(f"{name}/{file}")
            info.size, info.mtime, info.mode = len(data), time, mode_of(file)
            tar.addfile(info, io.BytesIO(data))


def write_zip(path, name, files, time):
    date = datetime.datetime.fromtimestamp(time, datetime.timezone.utc).timetuple()[:6]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for file, data in sorted(files.items()):
            info = zipfile.ZipInfo(f"{name}/{file}", date)
            info.external_attr = (stat.S_IFREG | mode_of(file)) << 16
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    commands = {("licenses", 4): licenses, ("archive", 5): archive}
    command = commands.get((sys.argv[1] if len(sys.argv) > 1 else "", len(sys.argv)))
    if command is None:
        sys.exit(__doc__)
    command(*sys.argv[2:])
