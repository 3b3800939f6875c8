"""What the server answers, and what it refuses."""

from pathlib import Path

import pytest
from recorded_run import record
from starlette.testclient import TestClient

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.page.link import HOST
from lora_moe_rl.page.server import listen, make_app
from lora_moe_rl.page.web_files import FOLDER, SCRIPTS, STYLE


@pytest.fixture
def client(tmp_path):
    record(tmp_path / "runs" / "one")
    record(tmp_path / "secret", range(1, 2))
    return TestClient(make_app(tmp_path / "runs"), base_url=f"http://{HOST}")


def test_every_question_is_answered(client):
    (about,) = client.get("/api/runs").json()["runs"]
    assert about["name"] == "one" and about["step"] == 6

    def ask(question, **query):
        answer = client.get(f"/api/{question}", params={"run": "one", **query})
        assert answer.status_code == 200, answer.text
        return answer.json()

    assert "mismatch/kl" in ask("names")["names"]
    assert ask("metrics", name=["reward/mean"])["columns"]["reward/mean"][-1] == 0.6
    assert ask("settings")["settings"]["logging.samples_per_step"] == 8
    assert ask("samples", text="window", limit="3")["chosen"] == 12
    assert ask("sample", number="3")["messages"][1]["role"] == "tool"
    assert [one["step"] for one in ask("timeline", step="4", count="2")["steps"]] == [3, 4]
    assert ask("routes", step="4")["shown"]["step"] == 4
    assert ask("layer_routes", layer="1")["steps"] == [1, 2, 3, 4, 5, 6]
    assert ask("adapter") == {"checkpoints": []}


def test_checkpoints_are_those_of_the_run_alone(client, tmp_path):
    """Not a copy that a user keeps beside them, nor what a link leads to."""
    folder = tmp_path / "runs/one/checkpoints"
    for path in (folder / "step-000004", folder / "step-000004.bak", tmp_path / "step-000005"):
        path.mkdir(parents=True)
    (folder / "step-000005").symlink_to(tmp_path / "step-000005")
    (found,) = client.get("/api/adapter?run=one").json()["checkpoints"]
    assert found["step"] == 4 and "manifest.json" in found["error"]


def test_checkpoints_that_cannot_be_looked_for_are_no_error_of_the_page(
    client, tmp_path, monkeypatch
):
    folder = tmp_path / "runs/one/checkpoints"
    (folder / "step-000004").mkdir(parents=True)
    plain = Path.iterdir

    def refuses(path):
        if path == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(Path, "iterdir", refuses)
    found = client.get("/api/adapter?run=one").json()
    assert found["checkpoints"] == [] and "Permission denied" in found["error"]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/samples?run=../secret", 404, "no run '../secret'"),
        ("/api/trace?run=one", 404, "no trace"),
        ("/api/passwords?run=one", 404, "no question"),
        ("/api/sample?run=one&number=999", 404, "no such sample"),
        ("/api/sample?run=one", 400, "number=N"),
        ("/api/samples?run=one&step_from=two", 400, "step_from='two' is not a whole number"),
        ("/api/samples?run=one&order=best", 400, "order='best' is not one of newest"),
        ("/api/layer_routes?run=one", 400, "layer=N"),
        ("/api/samples?run=one&limit=100000", 400, "limit=100000"),
        ("/api/samples?run=one&stepfrom=2", 400, "'stepfrom' is not asked for"),
        ("/web/../server.py", 404, ""),
        ("/web/%2e%2e%2fserver.py", 404, ""),
        ("/web/index.html", 404, "no index.html"),
    ],
)
def test_what_makes_no_sense_is_refused_and_says_why(client, path, status, says):
    answer = client.get(path)
    assert (answer.status_code, says in answer.text) == (status, True), answer.text


def test_a_request_by_another_name_of_this_machine_is_refused(client):
    for path in ("/", "/api/runs", "/api/samples?run=one"):
        assert client.get(path, headers={"Host": "evil.example"}).status_code == 400
        assert client.get(path, headers={"Host": "localhost:7420"}).status_code == 200


def test_every_answer_forbids_scripts_that_are_not_its_own(client):
    for path in ("/", "/api/runs", f"/web/{STYLE}"):
        policy = client.get(path).headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy
        assert "unsafe" not in policy


def test_the_page_names_each_of_its_files_and_no_other_host(client):
    html = client.get("/").text
    kinds = {path.name for path in FOLDER.iterdir()}
    assert kinds == {*SCRIPTS, STYLE, "index.html"}
    for name in (*SCRIPTS, STYLE):
        assert f"web/{name}" in html
        text = client.get(f"/web/{name}").text
        assert "http" not in text and "innerHTML" not in text and "eval(" not in text


@pytest.mark.parametrize("port", [70000, -1])
def test_a_number_that_is_no_port_is_an_error(port):
    with pytest.raises(ConfigError, match=f"--port {port} cannot be had on {HOST}: .*0-65535"):
        listen(port)


def test_a_port_that_is_taken_is_an_error_with_the_way_out():
    with (
        listen(0) as taken,
        pytest.raises(ConfigError, match=r"cannot be had .* 0 for any that is free"),
    ):
        taken.listen()
        listen(taken.getsockname()[1])


def test_the_socket_is_on_the_loopback():
    with listen(0) as found:
        assert found.getsockname()[0] == "127.0.0.1"
