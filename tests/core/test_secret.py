"""A setting is written to many places, so none may be a key."""

import pytest

import train
from zero.core.secret import hidden, looks_secret, refuse_secrets
from zero.errors import ConfigError
from zero.trainer.config import keys, read

HEX = "0123456789abcdef0123456789abcdef01234567"
SECRETS = [
    HEX,
    f"wandb_v1_{HEX}",
    f"local-{HEX}",
    "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "github_pat_11ABCDEFG0abcdefghijkl_abcdefghijklmnop",
    "glpat-abcdefghij0123456789",
    "sk-ant-api03-abcdefghijklmnopqrstuvwxyz",
    "AKIAIOSFODNN7EXAMPLE",
    "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    f"ya29.a0AfB_{HEX}",
    "npm_abcdefghijklmnopqrstuvwxyz0123456789",
    "sk_" + "live_abcdefghijklmnop12345678",
    "rk_" + "test_abcdefghijklmnop12345678",
    "SG." + "abcdefghijklmnopqrstuv.ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789abcdefg",
    "xoxb-123456789012-abcdef",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc",
    "https://me:correct-horse@example.org/data",
    "s3://bucket/x?X-Amz-Credential=me&signature=abcdefgh12345678",
    "https://example.org/data?api_key=abcdefgh",
    "-----BEGIN OPENSSH PRIVATE KEY-----",
]
PLAIN = [
    "functional-zero",
    "runs/2026-11-21/12-00-00-123456",
    f"/cache/hub/models--me--model/snapshots/{HEX}/weights",
    f"step-{HEX}",
    HEX[:39],
    "sk-learn-like-names-are-words-too",
    "task-0123456789012345678901234",
    "https://example.org:8080/data?rows=12345678&rows_key_by=bananas12",
    "npm_cache_folder/of_several_words_and_more",
    "sk_live_run",
    "rk_test_of_stage_3_with_a_long_name",
    "risk_test_abcdefghijklmnop12345678",
    "SG.small.model",
    "MSG.abcdefghijklmnopqrstuv.ABCDEFGHIJKLMNOPQRSTUV",
    "ya29.bin",
    "Maya29.checkpoint-of-a-long-name",
    "s3://user@bucket/key",
    "[Block,Attention]",
]


@pytest.mark.parametrize("text", SECRETS)
@pytest.mark.parametrize("around", ["{}", "a note, {} and more", "[x,{}]", "x={}"])
def test_what_services_give_out_is_known_wherever_it_stands(text, around):
    assert looks_secret(around.format(text))


@pytest.mark.parametrize("text", PLAIN)
def test_what_people_call_their_runs_and_folders_is_not(text):
    assert not looks_secret(text)
    assert hidden(text, {}) == text


def test_a_refusal_names_the_key_and_keeps_the_secret():
    with pytest.raises(ConfigError, match=r"^tracker\.run: this looks like a secret") as refused:
        refuse_secrets({"steps": 3, "tracker": {"run": f"hf_{HEX}"}}, {})
    assert HEX not in str(refused.value)
    with pytest.raises(ConfigError, match=r"^zero\.units:"):
        refuse_secrets({"zero": {"units": ["Block", HEX]}}, {})
    refuse_secrets({"zero": {"units": ["Block"], "stage": 3, "path": None}}, {})


def test_what_is_said_of_an_error_has_no_secret():
    assert hidden(f"no answer from https://a:{HEX}@b.example in 3 s", {}) == "no answer from *** in 3 s"


# What the environment keeps

ENVIRONMENT = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+bPxRfiCY",
    "DB_PASSWORD": "correct horse",
    "TOKEN": "no shape at all",
    "SECRETS_DIR": "/run/secrets",
    "WANDB_IDENTITY_TOKEN_FILE": "/run/identity",
    "TOKENIZERS_PARALLELISM": "sometimes",
    "PIN_KEY": "1234567",
}


@pytest.mark.parametrize("name", ENVIRONMENT)
@pytest.mark.parametrize("around", ["{}", "/data/{}/texts", "x{}y"])
def test_a_value_is_a_secret_where_its_variable_is_called_so(name, around):
    """A short one may be part of a path by chance, and a path to a secret is none."""
    settings = {"tracker": {"run": around.format(ENVIRONMENT[name])}}
    if name not in ("AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "TOKEN"):
        refuse_secrets(settings, ENVIRONMENT)
        return
    with pytest.raises(ConfigError, match=rf"^tracker\.run: this looks like a secret \({name}\), and") as refused:
        refuse_secrets(settings, ENVIRONMENT)
    assert ENVIRONMENT[name] not in str(refused.value)
    assert hidden(f"refused: {settings['tracker']['run']}", ENVIRONMENT) == f"refused: {around.format('***')}"


def test_no_key_of_ours_is_called_like_a_secret():
    refuse_secrets(dict.fromkeys(keys(), "x"), {})


def test_settings_from_anywhere_are_compared_with_the_environment(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "correct horse")
    with pytest.raises(ConfigError, match=r"^tracker\.run: .*MY_API_KEY"):
        read({"tracker": {"name": "wandb", "run": "on correct horses"}})


@pytest.mark.parametrize("short", ["hunter2", "wJalrXUtnFEMI/K7MDENG+bPxRfiCY"])
@pytest.mark.parametrize(
    "word",
    [
        "tracker.run=${oc.env:DB_PASSWORD}",
        "hydra.run.dir=runs/${oc.env:DB_PASSWORD,none}/x",
        "data.folder=/data/${oc.decode:${oc.env:DB_PASSWORD}}",
        "+hydra.job.env_set.AWS_SECRET_ACCESS_KEY={}",
        "+hydra.job.env_set={{A:1,AWS_SECRET_ACCESS_KEY:{}}}",
        "ds_config={{api_key:{}}}",
    ],
)
def test_a_word_that_asks_for_a_secret_is_refused_before_anything_is_written(here, monkeypatch, capfd, word, short):
    monkeypatch.setenv("DB_PASSWORD", short)
    word = word if word.count("$") else word.format(short)
    assert train.main(["tracker=wandb", "tracker.mode=offline", word]) == 2
    said = capfd.readouterr()
    assert short not in said.out + said.err
    assert "this looks like a secret (" in said.err
    assert not list(here.iterdir())


def test_a_secret_in_a_folder_of_hydras_is_refused_too(here, monkeypatch, capfd):
    """Under another name, which no word shows."""
    monkeypatch.setenv("DB_PASSWORD", "correct-horse")
    monkeypatch.setenv("WHERE", "correct-horse")
    assert train.main(["hydra.run.dir=runs/${oc.env:WHERE}"]) == 2
    said = capfd.readouterr()
    assert "hydra.run.dir: this looks like a secret (DB_PASSWORD)" in said.err
    assert "correct-horse" not in said.out + said.err
    assert not list(here.iterdir())
