"""The parts of the development cluster that need no Kubernetes: certificates, ports, processes, sharing."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID

from devcluster.access import Access
from devcluster.certs import Authority, Credentials
from devcluster.ports import Port
from devcluster.processes import Component, ComponentFailed, Spawner, tail
from devcluster.sharing import shared

ROOT = Path(__file__).parent.parent.parent


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- certificates


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def builder(authority: Authority) -> verification.PolicyBuilder:
    roots = x509.load_pem_x509_certificates(authority.file.read_bytes())
    return verification.PolicyBuilder().store(verification.Store(roots)).time(datetime.now(UTC))


def load(credentials: Credentials) -> x509.Certificate:
    return x509.load_pem_x509_certificate(credentials.certificate.read_bytes())


@pytest.mark.parametrize(
    "host", [x509.DNSName("localhost"), x509.IPAddress(__import__("ipaddress").ip_address("127.0.0.1"))]
)
def test_a_server_certificate_verifies_for_its_hosts_only(authority: Authority, host: x509.DNSName | x509.IPAddress):
    certificate = load(authority.issue("server", "server", hosts=["localhost", "127.0.0.1"]))
    builder(authority).build_server_verifier(host).verify(certificate, [])
    with pytest.raises(verification.VerificationError):
        builder(authority).build_server_verifier(x509.DNSName("elsewhere")).verify(certificate, [])


def test_a_client_certificate_is_no_server_certificate(authority: Authority):
    certificate = load(authority.issue("client", "someone", ["a group", "another"]))
    assert certificate.subject.rfc4514_string() == "CN=someone,O=another,O=a group"
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_another_authority_does_not_vouch_for_it(authority: Authority, tmp_path: Path):
    (tmp_path / "other").mkdir()
    certificate = load(Authority(tmp_path / "other").issue("server", "server", hosts=["localhost"]))
    with pytest.raises(verification.VerificationError):
        builder(authority).build_server_verifier(x509.DNSName("localhost")).verify(certificate, [])


def test_keys_are_their_owners_only(authority: Authority):
    key = authority.issue("client", "someone").key
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


# ---- ports


def test_a_port_is_held_until_closed_and_shared_with_who_asks_for_that():
    port = Port()
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port.number))
    with socket.socket() as component:
        component.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        component.bind(("127.0.0.1", port.number))
        component.listen()
        for _ in range(20):  # each of them comes to the one that listens
            with socket.create_connection(("127.0.0.1", port.number), timeout=1):
                component.accept()[0].close()
    port.close()


def test_ports_differ():
    ports = [Port() for _ in range(50)]
    assert len({port.number for port in ports}) == 50
    for port in ports:
        port.close()


# ---- processes


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    made = Spawner()
    yield made
    made.close()


def shell(spawner: Spawner, folder: Path, script: str) -> Component:
    return Component("shell", ["/bin/sh", "-c", script], folder / "shell.log", spawner)


def test_it_lives_on_when_the_thread_that_asked_for_it_ends(spawner: Spawner, tmp_path: Path):
    component = shell(spawner, tmp_path, "echo up; exec sleep 60")
    thread = threading.Thread(target=component.start)
    thread.start()
    thread.join()
    until(lambda: component.log.read_text() == "up\n")
    time.sleep(0.1)
    component.check()
    component.kill()
    assert component.pid is None


def test_it_dies_with_its_parent(tmp_path: Path):
    code = f"""if True:
        import time
        from pathlib import Path
        from devcluster.processes import Component, Spawner
        component = Component("sleep", ["/bin/sleep", "60"], Path({str(tmp_path)!r}, "log"), Spawner())
        component.start()
        print(component.pid, flush=True)
        time.sleep(60)"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
    parent.kill()
    parent.communicate()
    until(lambda: not alive(pid), seconds=2)


def test_it_does_not_start_for_a_parent_that_is_gone():
    launch = ROOT / "devcluster" / "launch.py"
    done = subprocess.run([sys.executable, "-I", "-S", launch, "1", "/bin/echo"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the parent is gone" in done.stderr


def test_stop_asks_first_and_then_kills(spawner: Spawner, tmp_path: Path):
    polite = shell(spawner, tmp_path, "trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.01; done")
    polite.start()
    until(lambda: polite.log.read_text())
    polite.stop(grace=10)
    assert polite.log.read_text() == "up\nbye\n"

    stubborn = shell(spawner, tmp_path, "trap '' TERM; echo deaf; while :; do sleep 0.01; done")
    stubborn.start()
    until(lambda: "deaf" in stubborn.log.read_text())
    began = time.monotonic()
    stubborn.stop(grace=0.3)
    assert 0.3 <= time.monotonic() - began < 2


def test_frozen_is_frozen_until_thawed_and_can_be_stopped(spawner: Spawner, tmp_path: Path):
    component = shell(spawner, tmp_path, "while :; do echo x; done")
    component.start()
    until(lambda: component.log.exists() and component.log.stat().st_size)
    component.freeze()
    size = component.log.stat().st_size
    time.sleep(0.1)
    assert component.log.stat().st_size == size
    component.thaw()
    until(lambda: component.log.stat().st_size > size)
    component.freeze()
    component.stop(grace=5)
    assert component.pid is None


def test_one_that_ended_is_told_with_the_end_of_its_log(spawner: Spawner, tmp_path: Path):
    component = shell(spawner, tmp_path, "seq 1000; exit 3")
    component.start()
    component.wait(10)
    with pytest.raises(ComponentFailed, match=r"(?s)shell ended with status 3.*\n999\n1000$") as caught:
        component.check()
    assert "\n980\n" not in str(caught.value)


def test_ctrl_c_does_not_reach_it(spawner: Spawner, tmp_path: Path):
    component = shell(spawner, tmp_path, "exec sleep 60")
    component.start()
    assert component.pid is not None
    assert os.getpgid(component.pid) != os.getpgid(0)
    component.kill()


def test_the_end_of_a_long_log_is_read(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("x" * 100_000 + "\nlast\n")
    assert tail(log).endswith("\nlast")


# ---- sharing

SHARER = """if True:
    import sys, time
    from contextlib import contextmanager
    from pathlib import Path
    from devcluster.access import Access
    from devcluster.sharing import shared

    folder, name = Path(sys.argv[1]), sys.argv[2]
    def note(text):
        with (folder / "log").open("a") as log:
            log.write(text + chr(10))
    @contextmanager
    def start():
        time.sleep(0.3)
        note(f"{name} starts")
        yield Access("https://" + name, folder, folder)
        note(f"{name} stops")
    with shared(folder, start) as access:
        note(f"{name} uses {access.url[8:]}")
        while not (folder / f"{name} may go").exists():
            time.sleep(0.01)
        note(f"{name} is done")"""


class Run:
    """A test run: a folder that sharers note in what they do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        command = [sys.executable, "-c", SHARER, str(self.folder), name]
        self.processes[name] = subprocess.Popen(command, cwd=ROOT)

    def let_go(self, name: str) -> None:
        (self.folder / f"{name} may go").touch()

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def notes(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []

    def until(self, note: str) -> None:
        until(lambda: note in self.notes(), seconds=30)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    for name in made.processes:
        made.kill(name)


def test_the_first_starts_it_and_stops_it_after_the_last(run: Run):
    for name in "abc":
        run.start(name)
    until(lambda: sum(" uses " in note for note in run.notes()) == 3, seconds=30)
    owner = run.notes()[0][0]
    assert {f"{name} uses {owner}" for name in "abc"} <= set(run.notes())
    run.let_go(owner)
    run.until(f"{owner} is done")
    time.sleep(0.3)
    assert f"{owner} stops" not in run.notes()
    for name in "abc":
        run.let_go(name)
    run.until(f"{owner} stops")
    assert run.notes()[-1] == f"{owner} stops"
    assert sum("starts" in note for note in run.notes()) == 1


def test_a_killed_user_is_not_waited_for_and_a_killed_owner_is_followed(run: Run):
    run.start("a")
    run.until("a uses a")
    run.start("b")
    run.until("b uses a")
    run.kill("a")
    run.start("c")
    run.until("c uses c")
    run.let_go("c")
    run.until("c is done")
    assert "c stops" not in run.notes()
    run.kill("b")
    run.until("c stops")


def test_one_that_cannot_be_started_leaves_it_to_the_next(tmp_path: Path):
    @contextmanager
    def broken() -> Iterator[Access]:
        raise OSError("cannot")
        yield

    @contextmanager
    def works() -> Iterator[Access]:
        yield Access("https://x", tmp_path, tmp_path)

    with pytest.raises(OSError, match="cannot"), shared(tmp_path, broken):
        pass
    with shared(tmp_path, works) as access:
        assert access.url == "https://x"
