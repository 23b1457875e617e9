"""Passwords and tokens of URLs are known where they are needed, and written down nowhere."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from fsspec.utils import infer_storage_options

from phalanx.cli.main import main
from phalanx.layout.run import Run, RunError
from phalanx.layout.url import Url, redacted

# A URL with secrets, and these secrets.
SECRET = [
    ("sftp://user:pass1word@host/run", ["pass1word"]),
    ("sftp://user:p@ss:word@host:22/run", ["p@ss:word"]),
    ("ftp://:pass1word@[::1]:21/run", ["pass1word"]),
    ("smb://domain%5Cuser:pass%401@host/share", ["pass%401"]),
    ("abfs://box@account.dfs.core.windows.net/run?sv=2024-11-04&sig=ab%2Bcd%3D", ["ab%2Bcd%3D"]),
    ("s3://bucket/run?X-Amz-Signature=00ff11&X-Amz-Credential=AKIA/2026", ["00ff11", "AKIA/2026"]),
    ("https://host/run?token=first1&region=eu&token=second2", ["first1", "second2"]),
    ("gs://bucket/run?u=eyJhbGciOiJIUzI1NiJ9.eyJ1IjoxfQ.c2ln", ["eyJhbGciOiJIUzI1NiJ9.eyJ1IjoxfQ.c2ln"]),
    ("https://host/run#access_token=third3", ["third3"]),
]  # fmt: skip
PLAIN = [
    "s3://bucket/run", "s3://bucket/run@2:x", "hf://datasets/user/name@main/run", "file:///a/b:c@d",
    "abfs://box@account.dfs.core.windows.net/run", "https://host:8080/run?region=eu-central-1",
    "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/run", "memory://a/b", "http://[::1]:80/x",
    "sftp://user@host:22/run", "bucket/run", "",
]  # fmt: skip


@pytest.mark.parametrize(("text", "secrets"), SECRET)
def test_what_is_written_of_a_url_has_no_secret_and_a_connection_has_all(
    text: str, secrets: list[str]
) -> None:
    url = Url(text)
    for shown in (
        str(url),
        f"{url}",
        json.dumps(url),
        copy.deepcopy(url),
        redacted(text),
    ):
        assert not [secret for secret in secrets if secret in shown]
    assert sorted(url.secrets.values()) == sorted(secrets)
    assert url.connection() == (text, {})
    assert Url(url) is url


@pytest.mark.parametrize("text", PLAIN)
def test_a_url_without_secrets_stays_as_it_is(text: str) -> None:
    url = Url(text)
    assert (str(url), url.secrets, url.unset) == (text, {}, [])
    assert url.connection() == (text, {})


@pytest.mark.parametrize(("text", "secrets"), SECRET)
def test_a_url_with_its_variables_set_is_the_url_that_was_given(
    text: str, secrets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Url(text)
    written = Url(str(given))  # as it is read again from the run's folder
    assert written.secrets == {}
    assert sorted(written.unset) == sorted(given.secrets)
    for name, secret in given.secrets.items():
        monkeypatch.setenv(name, secret)
    assert written.connection() == (text, {})
    assert written.unset == []


@pytest.mark.parametrize(
    "password", ["plain", "a/b", "a?b", "a#b", "[a]", "p@ss", "a:b", "100%"]
)
def test_a_password_of_a_variable_may_have_any_character(
    password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SFTP_PASSWORD", password)
    address, options = Url(
        "sftp://user:${SFTP_PASSWORD}@host:22/run/a"
    ).connection()
    # What fsspec makes of them.
    taken = infer_storage_options(address) | options
    assert taken == {
        "protocol": "sftp", "path": "/run/a", "host": "host", "port": 22, "username": "user",
        "password": password,
    }  # fmt: skip


def test_a_password_with_a_slash_is_still_known_for_one() -> None:
    url = Url("sftp://user:p/w?x@host/run")
    assert "p/w" not in url
    assert url.connection() == ("sftp://user@host/run", {"password": "p/w?x"})


def test_values_of_a_query_come_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SIGNATURE", "a%2Bb")
    address, _ = Url("abfs://box@host/run?sv=1&sig=${SIGNATURE}").connection()
    assert parse_qsl(urlsplit(address).query) == [("sv", "1"), ("sig", "a+b")]


def test_secrets_reach_a_rank_of_its_own_process_and_no_table() -> None:
    run = Run.parse(
        "", "run", ("checkpoint.remote=memory://user:pass1word@host/run",)
    )
    # as multiprocessing sends it
    there: Run = ForkingPickler.loads(ForkingPickler.dumps(run))
    for each in (run, there, replace(run, layout="dp2"), run.for_ranks(1)):
        assert Url(each.checkpoint.remote).secrets == {
            "PHALANX_REMOTE_PASSWORD": "pass1word"
        }
        assert "pass1word" not in str(each) + repr(each) + json.dumps(
            asdict(each)
        )
    assert type(asdict(run)["checkpoint"]["remote"]) is str
    assert Run.parse(str(run)) == run


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (
            "cannot open 'sftp://u:pass1word@h/x': no",
            "cannot open 'sftp://u:***@h/x': no",
        ),
        (
            "a ftp://u:pass1word@h, b s3://b?sig=pass1word.",
            "a ftp://u:***@h, b s3://b?sig=***",
        ),
        ("cut: sftp://user:pass1wo", "cut: sftp://user:***"),
        ('{"url": "sftp://u:pass1word@h/x"}', '{"url": "sftp://u:***@h/x"}'),
        ("tcp://127.0.0.1:29500 is taken", "tcp://127.0.0.1:29500 is taken"),
        (
            "see https://pytorch.org/docs?x=1#y",
            "see https://pytorch.org/docs?x=1#y",
        ),
    ],
)
def test_secrets_are_hidden_in_text_of_others(text: str, hidden: str) -> None:
    assert redacted(text) == hidden


def test_a_secret_that_stands_alone_in_an_error_is_hidden() -> None:
    url = Url("sftp://user:pass1word@host/run")
    assert (
        url.masked("530 user cannot log in with pass1word")
        == "530 user cannot log in with ***"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["checkpoint.remote=nope://user:pass1word@host/run"],
        ["checkpoint.remote=nope://user:pass1 word@host/run"],
        ['checkpoint={remote="nope://user:pass1word@host/run", every=-1}'],
        ["checkpoint.remote=memory://u:pass1word@h", "steps=many"],
        ["data=https://user:pass1word@host/data"],
        ["data=['https://host/data?token=pass1word']"],
        ["out=sftp://user:pass1word@host/run"],
        ["checkpoint.dir=sftp://user:pass1word@host/run"],
        ["model=hf:https://user:pass1word@host/model"],
        ["machine=https://user:pass1word@host/model"],
        ["checkpoint.romote=sftp://user:pass1word@host/run"],
        [f"checkpoint.remote=nope://user:{'x' * 90}pass1word@host/run"],
        [f"checkpoint.remote={['sftp://user:pass1word@host']}"],
    ],
)
def test_a_refusal_quotes_no_secret(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError) as refused:
        Run.parse("", "run", tuple(words))
    for text in (
        str(refused.value),
        *(part for m in refused.value.mistakes for part in m),
    ):
        assert "pass1" not in text
        assert "xxxx" not in text
    assert main(["train", *words]) == 2
    said = "".join(capsys.readouterr())
    assert "pass1" not in said
    assert "xxxx" not in said


def test_a_variable_that_is_not_set_is_named_before_anything_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PHALANX_REMOTE_PASSWORD", raising=False)
    written = tmp_path / "run.toml"
    assert (
        main(
            [
                "train",
                "checkpoint.remote=memory://u:pass1word@h/x",
                "--print-config",
            ]
        )
        == 0
    )
    written.write_text(capsys.readouterr().out)
    assert "pass1word" not in written.read_text()
    assert main(["train", str(written)]) == 2
    assert "`export PHALANX_REMOTE_PASSWORD=...`" in capsys.readouterr().err
    # needs no remote folder
    assert main(["check", "dp2", "--model", str(written)]) == 0


@pytest.mark.parametrize(
    "system", ["slurm", "k8s", "torchrun", "ray", "sky", "kubeflow"]
)
def test_no_job_is_written_with_a_password_and_one_with_a_variable_is(
    system: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    for remote in (
        "sftp://user:pass1word@host/run",
        "sftp://user:${SFTP_PASSWORD}@host/run",
    ):
        file.write_text("")
        words = [
            str(file),
            "layout=",
            f"checkpoint.remote={remote.replace('sftp', 'memory')}",
        ]
        code = main(["launch", system, *words, "--gpus", "1"])
        said = "".join(capsys.readouterr())
        assert "pass1word" not in said
        assert code == (2 if "pass1word" in remote else 0)
        assert "${" in said


def test_the_command_line_that_others_see_has_no_secret() -> None:
    program = (
        "import sys; from phalanx.cli.arguments import hide_secrets, without_secrets\n"
        "argv = sys.argv[1:]\n"
        "hide_secrets(argv)\n"
        "print(open('/proc/self/cmdline').read(), sys.argv, without_secrets(argv))"
    )
    words = [
        "checkpoint.remote=sftp://u:pass1word@h/x",
        "layout=dp2",
        "x=ftp://u:another1@h",
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True, text=True, check=True, env=dict(os.environ),
    )  # fmt: skip
    assert "pass1word" not in done.stdout
    assert "another1" not in done.stdout
    assert done.stdout.count("layout=dp2") == 3
    if sys.platform == "linux":
        assert "checkpoint.remote=sftp://u:*********@h/x\0" in done.stdout


def test_what_takes_the_place_of_this_program_finds_the_secret_in_its_environment() -> (
    None
):
    program = (
        "import os, sys; from phalanx.cli.arguments import without_secrets\n"
        "code = 'import sys; from phalanx.layout.url import Url; print(Url(sys.argv[1]).connection())'\n"
        "os.execv(sys.executable, [sys.executable, '-c', code, *without_secrets(sys.argv[1:])])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "sftp://u:pass1word@h/x"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "sftp://u:pass1word@h/x" in done.stdout
