"""Chats: formats, masks by marks and by spans, packing, and runs of `train.py` on them."""

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

import train  # noqa: E402
import zero  # noqa: E402
from zero.errors import ConfigError  # noqa: E402
from zero.testing import run_ranks  # noqa: E402
from zero.trainer.commands import sample  # noqa: E402
from zero.trainer.data import check_data, open_data  # noqa: E402
from zero.trainer.data.chat.chats import Chats  # noqa: E402
from zero.trainer.data.chat.encoder import ChatEncoder  # noqa: E402
from zero.trainer.data.chat.formats import chat_of  # noqa: E402
from zero.trainer.data.chat.packing import TOGETHER, PackedRows, first_fit  # noqa: E402
from zero.trainer.data.records import Record  # noqa: E402
from zero.trainer.data.rows import coded, positions_of, tokens_of, trains_of  # noqa: E402
from zero.trainer.data.source import ChatConfig  # noqa: E402
from zero.trainer.data.windows import slice_of  # noqa: E402
from zero.trainer.models import generate, hf  # noqa: E402

SEQ = 96
TURN = (
    "{{ '<|im_start|>' + m['role'] + '\\n' + (m['content'] or '') "
    "+ (m['tool_calls'] | tojson if m['tool_calls'] else '')"
)
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML = "{% for m in messages %}" + TURN + " + '<|im_end|>\\n' }}{% endfor %}" + PROMPT
HEAD = "{{ '<|im_start|>' + m['role'] + '\\n' }}"
MARKED = (
    "{% for m in messages %}"
    + HEAD
    + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}" + PROMPT
)
WRONG = MARKED.replace("== 'assistant'", "!= 'assistant'")
THINKING = (
    "{% for m in messages %}" + HEAD + "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}" + PROMPT
)
ASKED_TO_THINK = PROMPT.replace("assistant\\n", "assistant\\n<think>\\n")
ENDS = "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"


def model_folder(folder: Path, template: str | None = CHATML, family: str = "llama", **own: Any) -> Path:
    """A tokenizer of bytes with a chat template, and the settings of a tiny model."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|pad|>", additional_special_tokens=["<|im_start|>"]
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": len(fast), "max_position_embeddings": SEQ, **own}
    config = transformers.AutoConfig.for_model(family, **sizes)
    config.architectures = [type(transformers.AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("llama"))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **how: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **how}


def encoded(folder: Path, record: dict[str, Any], template: Path | None = None) -> str:
    """The chat's text, in which what trains stands in brackets."""
    encoder = ChatEncoder(str(folder), None if template is None else str(template), 256)
    _, chat = chat_of(Record(record, "here"))
    encoder.compare([(chat, "here")])
    return "".join(f"[{text}]" if trains else text for text, trains in encoder.shown(encoder.encode(chat, "here")))


# -- masks -------------------------------------------------------------------------------------------------------------

TWO_TURNS = [user("one"), assistant("two"), user("three"), assistant("four")]
SHAREGPT = {"user": "human", "assistant": "gpt"}
MASKED = (
    "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n[two<|im_end|>]\n"
    "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n[four<|im_end|>]\n"
)


@pytest.mark.parametrize(
    "record",
    [
        {"messages": TWO_TURNS},
        {
            "conversations": [
                {"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in TWO_TURNS
            ]
        },
    ],
)
def test_the_assistants_turns_train_with_the_token_that_ends_them(llama, record):
    assert encoded(llama, record) == MASKED


def test_the_templates_own_marks_give_the_same_mask(tmp_path):
    assert encoded(model_folder(tmp_path, MARKED), {"messages": TWO_TURNS}) == MASKED


def test_marks_of_another_role_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"here: the chat template marks .*of another role"):
        encoded(model_folder(tmp_path, WRONG), {"messages": TWO_TURNS})


def test_only_the_last_turn_trains_where_the_template_changes_earlier_ones(tmp_path):
    thought = [user("a"), assistant("<think>x</think>b"), user("c"), assistant("<think>y</think>d")]
    assert encoded(model_folder(tmp_path, THINKING), {"messages": thought}) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[<think>y</think>d<|im_end|>]\n"
    )


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_turn_trains_where_the_prompt_begins_a_thought_that_it_lacks(tmp_path, template):
    """As the prompts of DeepSeek and Nemotron do."""
    folder = model_folder(tmp_path, template.removesuffix(PROMPT) + ASKED_TO_THINK)
    assert encoded(folder, {"messages": TWO_TURNS}) == MASKED
    assert encoded(folder, {"messages": [assistant("hello"), *TWO_TURNS]}).startswith(
        "<|im_start|>assistant\n[hello<|im_end|>]\n<|im_start|>user\none"
    )


def test_marks_count_where_the_template_changes_earlier_turns(tmp_path):
    """The template's author has decided that these turns train."""
    content = "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
    marked = MARKED.replace("{{ m['content'] + '<|im_end|>' }}{% endgen", content + "{{ '<|im_end|>' }}{% endgen")
    thought = [user("a"), assistant("<think>x</think>b"), user("c"), assistant("<think>y</think>d")]
    told = encoded(model_folder(tmp_path, marked), {"messages": thought})
    assert "assistant\n[b<|im_end|>]" in told
    assert "assistant\n[<think>y</think>d<|im_end|>]" in told


def test_a_token_behind_the_whole_chat_hides_no_turn(tmp_path):
    """As Phi-3 has it: a text without the last turns is not the beginning of the chat's text."""
    turn = TURN.replace("<|im_start|>", "<|pad|>") + " + '<|pad|>\\n' }}{% endfor %}"
    folder = model_folder(tmp_path, "{% for m in messages %}" + turn + PROMPT.replace("<|im_start|>", "<|pad|>") + ENDS)
    assert encoded(folder, {"messages": TWO_TURNS}) == (
        "<|pad|>user\none<|pad|>\n<|pad|>assistant\n[two<|pad|>]\n"
        "<|pad|>user\nthree<|pad|>\n<|pad|>assistant\n[four<|pad|>\n<|im_end|>]"
    )


def test_completions_train_and_prompts_do_not(llama):
    assert encoded(llama, {"prompt": "a b", "completion": " c"}) == "a b[ c<|im_end|>]"
    both = {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}
    assert encoded(llama, both) == MASKED.replace("[two<|im_end|>]", "two<|im_end|>")
    asked = {"instruction": "add", "input": "1 1", "output": "2"}
    assert encoded(llama, asked) == ("<|im_start|>user\nadd\n\n1 1<|im_end|>\n<|im_start|>assistant\n[2<|im_end|>]\n")


def test_an_assistant_that_begins_trains_from_its_first_turn(llama):
    told = encoded(llama, {"messages": [assistant("hello"), user("one"), assistant("two")]})
    assert told == (
        "<|im_start|>assistant\n[hello<|im_end|>]\n<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\n[two<|im_end|>]\n"
    )


def test_tool_calls_train_and_results_do_not(llama):
    call = [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    chat = [user("a"), assistant("", tool_calls=call), {"role": "tool", "content": "2"}, assistant("b")]
    text = encoded(llama, {"messages": chat, "tools": '[{"type": "function"}]'})
    assert '[[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]<|im_end|>]' in text
    assert "tool\n2<|im_end|>\n" in text
    assert text.endswith("[b<|im_end|>]\n")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a"}, "here is no chat: it has text. Give messages"),
        ({"messages": [{"content": "a"}]}, "here: a message has no role"),
        ({"messages": []}, "here: messages are empty"),
        ({"messages": [{"role": "user", "content": None}]}, "here: a message of the role 'user' has no content"),
        ({"messages": [user("a"), {"role": "assistant"}]}, "here: a message of the role 'assistant' has no content"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "here: a message has the role 'narrator'"),
        ({"messages": "a"}, "here: messages are str, not a list"),
        ({"prompt": "a", "completion": TWO_TURNS}, "are a text and a list"),
        ({"messages": TWO_TURNS, "tools": "{"}, "here: tools are not JSON"),
    ],
)
def test_a_record_that_is_no_chat_is_refused_with_its_place(record, message):
    with pytest.raises(ConfigError, match=message):
        chat_of(Record(record, "here"))


def test_without_a_template_one_line_names_the_setting(tmp_path):
    folder = model_folder(tmp_path / "model", None)
    with pytest.raises(ConfigError, match=r"has no chat template, which here needs. Set data\.template=FILE"):
        encoded(folder, {"messages": TWO_TURNS})
    (tmp_path / "chatml.jinja").write_text(CHATML)
    assert encoded(folder, {"messages": TWO_TURNS}, tmp_path / "chatml.jinja") == MASKED


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_coded_row_holds_tokens_masks_and_positions():
    tokens, trains, positions = (
        torch.tensor([0, 7, 2**31]),
        torch.tensor([True, False, True]),
        torch.tensor([0, 1, 900]),
    )
    rows = coded(tokens, trains, positions)
    assert torch.equal(tokens_of(rows), tokens)
    assert torch.equal(trains_of(rows), trains)
    assert torch.equal(positions_of(rows), positions)
    assert torch.equal(tokens_of(tokens), tokens), "a plain row is its tokens"


@pytest.mark.parametrize("capacity", [100, None])
def test_every_epoch_has_each_document_once_in_its_own_order(capacity):
    lengths = [random.Random(number).randrange(1, 100) for number in range(2 * TOGETHER + 77)]
    packed = PackedRows(lengths, capacity, seed=1)
    orders = []
    for epoch in range(2):
        rows = [packed.row(number) for number in range(packed.of_epochs(epoch), packed.of_epochs(epoch + 1))]
        orders.append([document for row in rows for document in row])
        assert sorted(orders[-1]) == [*range(len(lengths))]
        assert all(sum(lengths[document] for document in row) <= (capacity or 100) for row in rows)
        if capacity:
            assert sum(lengths) / len(rows) > 0.9 * capacity, "rows are full"
    assert orders[0] != orders[1]
    assert PackedRows(lengths, capacity, seed=1).row(2000) == packed.row(2000), "whatever was read before"
    assert PackedRows(lengths, capacity, seed=2).row(0) != packed.row(0)


def test_first_fit_takes_the_first_row_with_room():
    assert first_fit([5, 4, 3, 6, 1, 2], 10) == [[0, 1, 4], [2, 3], [5]]


def chats(count: int) -> list[dict[str, Any]]:
    """Of one to three turns; some have no answer."""
    made = []
    for number in range(count):
        turns = [m for n in range(1 + number % 3) for m in (user(f"{number} and {n}"), assistant("so " * (number % 5)))]
        made.append({"messages": turns[:1] if number % 10 == 9 else turns, "id": number})
    return made


@pytest.fixture
def data(llama, tmp_path):
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats(60))))
    return ChatConfig(
        path=str(tmp_path / "chats.jsonl"), tokenizer=str(llama), cache=str(tmp_path / "cache"), holdout=0.2
    )


def changed(config: ChatConfig, **changes: Any) -> ChatConfig:
    return ChatConfig(**dict(config) | changes)


def documents(rows: torch.Tensor) -> Counter[tuple[int, ...]]:
    """The documents of rows, without padding, as tuples of tokens and masks."""
    counted: Counter[tuple[int, ...]] = Counter()
    for row in rows:
        starts = [*torch.nonzero(positions_of(row) == 0).flatten().tolist(), len(row)]
        for begin, end in pairwise(starts):
            part = row[begin:end]
            if trains_of(part).any():
                counted[(*tokens_of(part).tolist(), *trains_of(part).tolist())] += 1
    return counted


def test_packed_and_padded_rows_have_the_same_documents(data):
    packed, padded = (open_data(changed(data, pack=pack), SEQ, 0) for pack in (True, False))
    every = [opened.rows(0, opened.rows_of_epochs(1)) for opened in (packed, padded)]
    assert documents(every[0]) == documents(every[1])
    assert len(every[0]) < len(every[1])
    assert "6 without a token that trains" in packed.about
    held = [opened.validation(0, opened.validation_rows) for opened in (packed, padded)]
    assert documents(held[0]) == documents(held[1])


def test_the_rows_of_a_step_follow_those_of_the_step_before(data):
    opened, again = (open_data(data, SEQ, 3) for _ in range(2))
    whole = opened.rows(24, 28)
    assert torch.equal(torch.cat([again.rows(26, 28), again.rows(24, 26)]), whole[[2, 3, 0, 1]])
    assert torch.equal(again.rows(25, 27), whole[1:3])


def test_long_chats_are_cut_or_dropped(data, tmp_path):
    long = [{"messages": [user("a" * 200), assistant("b")]}, {"messages": [user("a"), assistant("b" * 200)]}]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, [*chats(60)[:16:3], *long])))
    config = changed(data, path=str(tmp_path / "long.jsonl"))
    assert "2 longer than a row, 1 left out" in open_data(config, SEQ, 0).about, "one has no answer where it is cut"
    assert "2 longer than a row, 2 left out" in open_data(changed(config, long="drop"), SEQ, 0).about


def by_document(model: Any, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The sum of the losses in plain torch on one document at a time, and the number of tokens that train."""
    total, tokens = torch.zeros(()), 0
    for row in rows:
        starts = [*torch.nonzero(positions_of(row) == 0).flatten().tolist(), len(row)]
        for begin, end in pairwise(starts):
            inputs, targets = tokens_of(row[begin : end - 1]), tokens_of(row[begin + 1 : end])
            targets = torch.where(trains_of(row[begin + 1 : end]), targets, -100)
            if len(inputs):
                logits = model(input_ids=inputs[None], use_cache=False).logits[0]
                total = total + F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
                tokens += int((targets != -100).sum())
    return total, tokens


def test_a_packed_document_sees_itself_alone(llama, data):
    """Loss and gradients are those of plain torch on one document at a time."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(llama))
    opened = open_data(data, SEQ, 0)
    rows = opened.rows(0, 4)
    assert any((positions_of(row) == 0).sum() > 2 for row in rows)
    for chunked in (False, True):
        loss, count = hf.loss_by_tokens(model, rows, chunked=chunked)
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        total, tokens = by_document(model, rows)
        assert int(count) == tokens > 40
        torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-4)
        for ours, theirs in zip(gradients, torch.autograd.grad(total, [*model.parameters()]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_ranks_that_share_rows_tell_documents_apart_also_for_a_model_that_does_not(data, tmp_path):
    """transformers' GptOss sees all chats of a packed row; the attention of shared rows does not."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2}
    folder = model_folder(tmp_path, family="gpt_oss", head_dim=8, num_key_value_heads=2, sliding_window=7, **experts)
    rows = open_data(data, SEQ, 0).rows(0, 4)

    def new_model() -> Any:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        torch.nn.init.normal_(model.model.layers[0].self_attn.sinks)
        return model

    def of_slice(world: zero.World) -> tuple[float, int]:
        with world.exclusive():
            model = new_model()
        zero.sequence_parallel(model, world)
        shared_rows = zero.sequence.SharedRows(world)
        with torch.no_grad():
            loss, count = hf.loss_by_tokens(model, slice_of(rows, world.rank, world.size), shared_rows=shared_rows)
        return loss.item(), int(count)

    with torch.no_grad():
        total, tokens = by_document(new_model(), rows)
        together, _ = hf.loss_by_tokens(new_model(), rows)
    assert abs(together - total) > 1e-2
    for size in (1, 2, 4):
        losses, counts = zip(*run_ranks(size, of_slice), strict=True)
        assert sum(counts) == tokens
        assert sum(losses) == pytest.approx(total.item(), rel=1e-6)


def test_models_that_do_not_look_at_positions_are_refused():
    kinds = {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2"), True),
        **dict.fromkeys(("bloom", "mamba", "gpt_oss", "biogpt", "xglm", "big_bird"), False),
    }
    for kind, knows in kinds.items():
        assert hf.knows_documents(hf.build(kind)) == knows, kind


def test_parquet_and_saved_datasets_hold_the_chats_of_json_lines(data, tmp_path):
    """In the same order, so with the same digest of tokens."""
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(chats(60))
    made.to_parquet(tmp_path / "parquet" / "chats.parquet")
    made.save_to_disk(tmp_path / "saved")
    lines = open_data(data, SEQ, 0)
    for path in ("parquet", "parquet/chats.parquet", "saved"):
        opened = open_data(changed(data, path=str(tmp_path / path)), SEQ, 0)
        assert torch.equal(opened.rows(0, 4), lines.rows(0, 4)), path
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes((tmp_path / "parquet" / "chats.parquet").read_bytes()[:-50])
    with pytest.raises(ConfigError, match=r"damaged\.parquet, row 0: Arrow cannot read it"):
        check_data(changed(data, path=str(damaged)), SEQ)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"messages": [}', r"bad\.jsonl, line 1 is not JSON"),
        ("[1]", r"bad\.jsonl, line 1 is not a record"),
        ('{"messages": [{"content": "a"}]}', r"bad\.jsonl, line 1: a message has no role"),
        ("", "holds no chat"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(data, tmp_path, text, message):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        check_data(changed(data, path=str(tmp_path / "bad.jsonl")), SEQ)


def test_chats_without_an_answer_are_refused_with_the_first(data, tmp_path):
    (tmp_path / "asked.jsonl").write_text("\n".join(json.dumps({"messages": [user(str(n))]}) for n in range(5)))
    with pytest.raises(ConfigError, match=r"asked\.jsonl, line 1, and all others: no token of an assistant"):
        open_data(changed(data, path=str(tmp_path / "asked.jsonl")), SEQ, 0)
    (tmp_path / "chats.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"txt holds no \.jsonl, "):
        check_data(changed(data, path=str(tmp_path / "chats.txt")), SEQ)


# -- train.py ----------------------------------------------------------------------------------------------------------


def run(llama, data, *words: str) -> int:
    own = ["model=hf", f"model.path={llama}", "data=chat", f"data.path={data.path}", f"data.cache={data.cache}"]
    few = [
        f"model.seq={SEQ}",
        "batch.global=4",
        "tracker.every=1",
        "sample.tokens=4",
        "data.holdout=0.2",
        "val.every=4",
    ]
    return train.main([*own, *few, *words])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_train_py_trains_chats_and_goes_on(llama, data, here, capsys):
    """Accumulation and a resumed run change no row, and the loss goes down."""
    assert run(llama, data, "steps=8", "hydra.run.dir=whole", "checkpoint.every=4") == 0
    assert "chats to train and" in capsys.readouterr().out
    parts = json.loads((here / "whole" / "summary.json").read_text())["example"]
    assert all(text.endswith("<|im_end|>") for text, trains in parts if trains)
    report = (here / "whole" / "report.html").read_text()
    assert report.count("<mark>") == sum(trains for _, trains in parts) > 0
    lengths = json.loads((here / "whole" / "summary.json").read_text())["lengths"]
    assert lengths["row"] == SEQ + 1
    assert sum(count for _, _, count in lengths["counts"]) == 54, "6 of 60 chats have no token that trains"
    assert "documents by their tokens" in report
    whole = [row["train/loss"] for row in rows_of(here / "whole")]
    assert whole[-1] < whole[0]
    assert (
        run(llama, data, "steps=8", "hydra.run.dir=pieces", "batch.micro=1", "debug.stop_at=4", "checkpoint.every=4")
        == 0
    )
    assert run(llama, data, "steps=8", "hydra.run.dir=rest", "batch.micro=1", "resume=pieces") == 0
    pieces = [row["train/loss"] for name in ("pieces", "rest") for row in rows_of(here / name)]
    assert pieces == pytest.approx(whole, rel=1e-5)
    assert run(llama, data, "mode=eval", "resume=whole") == 0
    said = capsys.readouterr().out
    assert f"validation loss {rows_of(here / 'whole')[-1]['val/loss']:.4f}" in said


def test_a_run_that_goes_on_with_another_batch_reads_the_rows_that_follow(llama, data, here, monkeypatch):
    read, real = list[tuple[int, int]](), Chats.rows
    monkeypatch.setattr(Chats, "rows", lambda self, start, stop: read.append((start, stop)) or real(self, start, stop))
    words = ("steps=9", "checkpoint.every=3", "checkpoint.dir=saved", "val.every=0", "resume=latest")
    for batch, last in ((4, 3), (2, 6), (6, 9)):
        assert run(llama, data, *words, f"batch.global={batch}", f"debug.stop_at={last}") == 0
    steps = [places for places in read if places != (0, 1)]  # without the row of the report
    assert steps == [(0, 4), (4, 8), (8, 12), (12, 14), (14, 16), (16, 18), (18, 24), (24, 30), (30, 36)]


def test_a_sample_asks_a_held_out_question_and_ends_with_the_turn(llama, data):
    opened = open_data(data, SEQ, 0)
    prompt, end = opened.prompt(SEQ)
    text = opened.decode(prompt[0])
    assert text.endswith("<|im_start|>assistant\n")
    assert text in opened.decode(opened.validation(0, 1)[0])
    assert opened.prompt(5)[0].tolist() == prompt[:, -5:].tolist()
    drawn = iter((65, 66, end, 67))

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return F.one_hot(torch.full(tokens.shape, next(drawn)), 400).float()

    row = generate(logits, prompt, 9, seq=SEQ, temperature=0, end=end)
    assert row[0, prompt.shape[1] :].tolist() == [65, 66, end]


def test_epochs_with_another_batch_name_the_steps_that_are_left(llama, data, here, capsys):
    words = ("epochs=1", "checkpoint.every=3", "checkpoint.dir=saved", "val.every=0", "resume=latest")
    assert run(llama, data, *words, "batch.global=2", "debug.stop_at=3") == 0
    capsys.readouterr()
    assert run(llama, data, *words, "batch.global=3") == 4
    said = capsys.readouterr().err
    opened = open_data(data, SEQ, 0)
    left = opened.rows_of_epochs(1) - 6
    assert "was saved with batch.global=2" in said
    assert f"Set steps={3 + -(-left // 3)} in place of epochs." in said
    assert run(llama, data, *words, "batch.global=2") == 0


TEMPLATED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"messages": TWO_TURNS}, TEMPLATED),
        ({"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}, TEMPLATED),
        ({"prompt": "a b", "completion": " c"}, "hello"),
    ],
)
def test_a_sample_asks_as_the_data_does(llama, data, here, capsys, record, prompt):
    """The template is for data with roles."""
    Path(data.path).write_text("\n".join(json.dumps(record | {"id": number}) for number in range(20)))
    assert run(llama, data, f"val.path={data.path}", "steps=2", "hydra.run.dir=asked", "checkpoint.every=2") == 0
    capsys.readouterr()
    assert sample.main(["asked", "hello", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith(prompt)
    assert sample.main(["asked", "hello", "--tokens", "3", "--raw"]) == 0
    assert capsys.readouterr().out.startswith("hello")


def test_a_row_is_shown_without_its_padding(data):
    opened = open_data(changed(data, pack=False), SEQ, 0)
    shown, row = "".join(text for text, _ in opened.example()), opened.decode(opened.rows(0, 1)[0])
    assert shown.endswith("<|im_end|>\n")
    assert row.startswith(f"{shown}<|im_end|>"), "of the padding"


@pytest.mark.slow
def test_two_ranks_train_the_rows_of_one(llama, data, here):
    for count in (1, 2):
        words = (f"launch.ranks={count}", f"hydra.run.dir=ranks{count}", "zero.stage=2", "steps=4", "batch.micro=1")
        assert run(llama, data, *words) == 0
    alone, shared = ([row["train/loss"] for row in rows_of(here / f"ranks{count}")] for count in (1, 2))
    assert shared == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "words",
    [
        ["launch.ranks=2", "zero.sequence=2"],
        ["launch.ranks=2", "zero.sequence=2", "data.pack=true"],
        ["debug.replay=2"],
        ["zero.activations=remat", "zero.stage=3", "offload=cpu"],
        ["model.chunked_loss=false"],
    ],
    ids=str,
)
def test_slices_replays_and_recomputation_train_the_same(llama, data, here, words):
    """Pairs of a loss by tokens with what else divides or repeats a step; slices have different numbers of tokens."""
    losses = []
    pack = "data.pack=true" if "data.pack=true" in words else "data.pack=false"
    for name, more in (("plain", [pack]), ("other", [pack, *words])):
        assert run(llama, data, "steps=4", f"hydra.run.dir={name}", *dict.fromkeys(more)) == 0
        losses.append([row["train/loss"] for row in rows_of(here / name)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.process
def test_packed_chats_of_ranks_that_share_rows_train_as_on_one_rank(data, here, tmp_path):
    """Attention sees the chat of a token alone, in its window; a chat goes on from one rank's slice to the next."""
    own = {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 7, "initializer_range": 0.2}
    gemma = model_folder(tmp_path / "gemma", family="gemma2", **own)
    losses = []
    for count in (1, 2):
        words = (f"launch.ranks={count}", f"zero.sequence={count}", f"hydra.run.dir=shared{count}", "zero.stage=3")
        assert run(gemma, data, "steps=4", *words) == 0
        losses.append([(row["train/loss"], row["val/loss"] or 0.0) for row in rows_of(here / f"shared{count}")])
    for ours, right in zip(*losses, strict=True):
        assert ours == pytest.approx(right, rel=1e-5)


def test_what_chats_need_is_said_in_one_line(llama, data, here, capsys):
    assert train.main(["data=chat", f"data.path={data.path}", f"data.tokenizer={llama}"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == ["data=chat needs model=hf model.path=FOLDER, a model of transformers"]


def test_ranks_read_slices_of_one_batch(data):
    """Rank 0 encodes; every rank reads the same digest and rows."""

    def read(world: zero.World) -> tuple[str, list[int]]:
        opened = open_data(data, SEQ, 0, world)
        return opened.digest, opened.rows(12, 16).flatten().tolist()

    assert len({str(result) for result in run_ranks(3, read)}) == 1
