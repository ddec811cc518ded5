import csv
import itertools
import json
import sys
import types
import warnings

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from torchq.calibration.data import Batch, CalibrationData, load_batches
from torchq.testing import tiny_llama

PAD, BOS, EOS, UNK, USER, ASSISTANT, SYSTEM, END = range(8)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
FIRST = len(SPECIAL)
NUM_WORDS = 100
TEMPLATE = "<s>{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|>{% endfor %}"
STRICT = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"


def make_tokenizer(*, bos=False, eos=False, template=None):
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *(f"w{i}" for i in range(NUM_WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos or eos:
        single = ("<s> " if bos else "") + "$A" + (" </s>" if eos else "")
        specials = [("<s>", BOS), ("</s>", EOS)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[4:],
    )
    result.chat_template = template
    return result


PLAIN = make_tokenizer()
WITH_BOS = make_tokenizer(bos=True)
CHAT = make_tokenizer(bos=True, template=TEMPLATE)


def words(count, start=0):
    return " ".join(f"w{i % NUM_WORDS}" for i in range(start, start + count))


def ids_of(count, start=0):
    return [FIRST + i % NUM_WORDS for i in range(start, start + count)]


def settings(source, **kwargs):
    return CalibrationData(source, **({"holdout": 0, "packing": False, "max_length": 256} | kwargs))


def rows_of(batches):
    """The sequences of batches that are not packed, without padding."""
    rows = []
    for batch in batches:
        ids = batch.inputs["input_ids"]
        mask = torch.ones_like(ids, dtype=torch.bool) if batch.mask is None else batch.mask
        rows += [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
    return rows


def documents_of(batches):
    """The documents of packed batches, without padding."""
    documents = []
    for batch in batches:
        ids, positions = batch.inputs["input_ids"], batch.inputs["position_ids"]
        mask = torch.ones_like(ids, dtype=torch.bool) if batch.mask is None else batch.mask
        for row, position, keep in zip(ids, positions, mask, strict=True):
            starts = [i for i, p in enumerate(position.tolist()) if p == 0 and keep[i]] + [int(keep.sum())]
            documents += [row[a:b].tolist() for a, b in itertools.pairwise(starts)]
    return documents


# ------------------------------------------------------------------------------------------------------------------ sources


def expect_two_texts(source, tokenizer=PLAIN, **kwargs):
    rows = rows_of(load_batches(settings(source, **kwargs), tokenizer).train)
    assert sorted(rows, key=len) == [ids_of(40), ids_of(70, 5)]


TEXTS = [words(40), words(70, 5)]
RECORDS = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]


def test_texts_in_lists_and_records():
    expect_two_texts(TEXTS)
    expect_two_texts(tuple(TEXTS))
    expect_two_texts(RECORDS)
    expect_two_texts([{"body": text, "text": "w1"} for text in TEXTS], column="body")
    expect_two_texts([TEXTS[0], RECORDS[1], "", None, {"text": None}, []])


def write_files(folder):
    (folder / "a.jsonl").write_text("\n\n".join(json.dumps(record) for record in RECORDS) + "\n")
    (folder / "a.json").write_text(json.dumps(RECORDS, indent=1))
    (folder / "lines.json").write_text("\n".join(json.dumps(text) for text in TEXTS))
    with open(folder / "a.csv", "w", newline="") as file:
        csv.DictWriter(file, ["id", "text"]).writeheader()
        csv.DictWriter(file, ["id", "text"]).writerows(RECORDS)


def test_files(tmp_path):
    write_files(tmp_path)
    for name in ("a.jsonl", "a.json", "lines.json", "a.csv"):
        expect_two_texts(tmp_path / name)
        expect_two_texts(str(tmp_path / name))


def test_text_file_is_one_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(words(100), encoding="utf-8-sig")
    assert rows_of(load_batches(settings(path), PLAIN).train) == [ids_of(100)]


def test_folder_is_its_files(tmp_path):
    (tmp_path / "one.txt").write_text(TEXTS[0])
    (tmp_path / "two.jsonl").write_text(json.dumps(TEXTS[1]))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "notes.md").write_text("w1 w2")
    expect_two_texts(tmp_path)


def test_csv_cells_may_be_long(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text\n" + words(50_000) + "\n")
    assert load_batches(settings(path, num_samples=4), PLAIN).num_tokens == 4 * 256
    assert csv.field_size_limit() == 131072
    path.write_text(f'id,text\n1,{words(40)}\n2,"{words(30)}\n\u2028{words(40, 30)}"\n3,{words(9)}\u2028 w9\n', encoding="utf-8")
    assert sorted(map(len, rows_of(load_batches(settings(path), PLAIN).train))) == [10, 40, 70]


def test_string_that_is_no_path_is_a_text():
    for text in (words(100), "w1 and/or " + words(100), words(40) + "\n" + words(40) + "\nnotes.txt", "~ " + words(100)):
        assert load_batches(settings(text), PLAIN).num_tokens == len(text.split())


def test_token_ids():
    lists = [ids_of(40), ids_of(70, 5)]
    expect_two_texts(lists, None)
    expect_two_texts([torch.tensor(ids) for ids in lists], None)
    expect_two_texts([torch.tensor(lists[0], dtype=torch.int32).numpy(), torch.tensor(lists[1]), torch.tensor([])], None)
    expect_two_texts([{"input_ids": ids, "labels": ids} for ids in lists], None)
    padded = [{"input_ids": [0] * 9 + ids, "attention_mask": [0] * 9 + [1] * len(ids)} for ids in lists]
    expect_two_texts(padded, None)
    assert rows_of(load_batches(settings(torch.tensor(ids_of(100))), None).train) == [ids_of(100)]
    grid = torch.tensor([ids_of(40), ids_of(40, 3)])
    assert sorted(rows_of(load_batches(settings(grid)).train)) == sorted(grid.tolist())


class StubDataset:
    """What torchq uses of a datasets.Dataset."""

    column_names = ("id", "text")

    def __init__(self, records):
        self.records = records
        self.read = 0

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        assert isinstance(index, int)
        self.read += 1
        return self.records[index]


class StubIterableDataset:
    column_names = None

    def __iter__(self):
        for i in range(10**9):
            yield {"text": words(20, i)}


def test_datasets():
    expect_two_texts(StubDataset(RECORDS))
    assert len(rows_of(load_batches(settings(StubIterableDataset(), num_samples=5), PLAIN).train)) == 5


def test_parquet_and_saved_datasets(tmp_path, monkeypatch):
    calls = []
    stub = types.ModuleType("datasets")
    stub.__spec__ = types.SimpleNamespace()
    stub.load_dataset = lambda *args, **kwargs: calls.append((args, kwargs)) or StubDataset(RECORDS)
    stub.load_from_disk = lambda path: calls.append(path) or StubDataset(RECORDS)
    monkeypatch.setitem(sys.modules, "datasets", stub)
    (tmp_path / "a.parquet").touch()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").touch()
    expect_two_texts(tmp_path / "a.parquet")
    expect_two_texts(tmp_path / "saved")
    expect_two_texts(tmp_path)
    parquet = (("parquet",), {"data_files": str(tmp_path / "a.parquet"), "split": "train"})
    assert calls == [parquet, str(tmp_path / "saved"), parquet]


def test_missing_datasets_package_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ValueError, match=r"reading .*a\.parquet needs the datasets package: pip install datasets"):
        load_batches(tmp_path / "a.parquet", PLAIN)


# -------------------------------------------------------------------------------------------------------------------- chats

MESSAGES = [{"role": "user", "content": words(40)}, {"role": "assistant", "content": words(30, 40)}]
CHAT_IDS = [BOS, USER, *ids_of(40), END, ASSISTANT, *ids_of(30, 40), END]


@pytest.mark.parametrize(
    "sample",
    [
        MESSAGES,
        {"messages": MESSAGES, "text": "w1", "prompt": "w2"},
        {"conversations": MESSAGES},
        {"conversations": [{"from": "human", "value": words(40)}, {"from": "gpt", "value": words(30, 40)}], "id": 3},
        {"instruction": words(10), "input": words(30, 10), "output": words(30, 40), "text": "w1"},
        {"instruction": words(40), "input": "", "output": words(30, 40)},
        {"prompt": words(40), "completion": words(30, 40)},
        {"prompt": words(40), "response": words(30, 40)},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
        {"dialogue": MESSAGES},
    ],
)
def test_chat_layouts(sample):
    column = "dialogue" if "dialogue" in sample else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rows_of(load_batches(settings([sample], column=column), CHAT).train) == [CHAT_IDS]


def test_sharegpt_system_turn():
    turns = [{"from": "system", "value": "w1"}, {"from": "human", "value": words(70)}]
    rows = rows_of(load_batches(settings([{"conversations": turns}]), CHAT).train)
    assert rows == [[BOS, SYSTEM, FIRST + 1, END, USER, *ids_of(70), END]]


def test_question_and_answer_are_a_text_without_a_chat_template():
    record = {"instruction": words(20), "input": words(20, 20), "output": words(30, 40)}
    assert rows_of(load_batches(settings([record]), PLAIN).train) == [ids_of(70)]


def test_chats_need_a_tokenizer_with_a_template():
    with pytest.raises(ValueError, match=r"chats, which need a chat template: set tokenizer\.chat_template, or give texts"):
        load_batches([MESSAGES], PLAIN)
    with pytest.raises(ValueError, match="chats, which need a tokenizer: pass tokenizer="):
        load_batches([MESSAGES])


def test_chat_the_template_refuses():
    turns = [{"role": "system", "content": "w1"}, *MESSAGES]
    with pytest.raises(ValueError, match=r"refuses a chat with the roles \['system', 'user', 'assistant'\]: no system role"):
        load_batches([turns], make_tokenizer(template=STRICT))


@pytest.mark.parametrize("turn", [{"from": "narrator", "value": "w1"}, {"speaker": "user", "text": "w1"}])
def test_unknown_turns_are_named(turn):
    with pytest.raises(ValueError, match=rf"chat 0 .* keys {', '.join(turn)} and from={turn.get('from')!r}; known are role"):
        load_batches([[turn]], CHAT)


# ------------------------------------------------------------------------------------------------------- windows, BOS and EOS


def windows(tokenizer, source, **kwargs):
    return rows_of(load_batches(settings(source, **kwargs), tokenizer).train)


def test_long_documents_are_cut_and_nothing_is_lost():
    rows = windows(PLAIN, words(1005), max_length=100)
    assert sorted(map(len, rows)) == [5] + [100] * 10
    assert sorted(token for row in rows for token in row) == sorted(ids_of(1005))
    rows = windows(None, torch.arange(1005), max_length=100)
    assert sorted(token for row in rows for token in row) == list(range(1005))


def test_every_window_starts_with_bos_if_the_tokenizer_adds_it():
    rows = windows(WITH_BOS, words(1005), max_length=101)
    assert sorted(map(len, rows)) == [6] + [101] * 10
    assert all(row[0] == BOS and BOS not in row[1:] for row in rows)
    assert not any(BOS in row for row in windows(PLAIN, words(1005), max_length=101))


def test_eos_stays_at_the_end_of_a_document():
    rows = windows(make_tokenizer(bos=True, eos=True), words(1004), max_length=101)
    assert all(row[0] == BOS for row in rows)
    assert [EOS in row for row in sorted(rows, key=len)] == [True] + [False] * 10
    wide = " ".join(f"w1{'':40}" for _ in range(20_000))  # pieces of a huge text are shorter than a window here
    rows = windows(make_tokenizer(bos=True, eos=True), wide, max_length=64, num_samples=8)
    assert len(rows) >= 8 and not any(EOS in row for row in rows) and all(row[0] == BOS for row in rows)


def test_no_second_bos():
    rendered = CHAT.apply_chat_template(MESSAGES, tokenize=False)
    assert windows(CHAT, [rendered]) == windows(CHAT, [MESSAGES]) == [CHAT_IDS]
    long = [{"role": "user", "content": words(300)}]
    rows = windows(CHAT, [long], max_length=101)
    assert sorted(map(len, rows)) == [3, 101, 101, 101]
    assert all(row.count(BOS) == 1 and row[0] == BOS for row in rows)


def test_later_windows_of_a_chat_without_bos_have_none():
    tokenizer = make_tokenizer(bos=True, template=TEMPLATE.replace("<s>", ""))
    rows = windows(tokenizer, [[{"role": "user", "content": words(300)}]], max_length=101)
    assert len(rows) == 3 and not any(BOS in row for row in rows)


# ------------------------------------------------------------------------------------------------------ choice of sequences


def test_choice_is_spread_seeded_and_without_duplicates():
    ids = torch.arange(100_000)
    first = [windows(None, ids, max_length=100, num_samples=64, seed=0) for _ in range(2)]
    assert first[0] == first[1]
    assert windows(None, ids, max_length=100, num_samples=64, seed=1) != first[0]
    starts = sorted(row[0] for row in first[0])
    assert len(set(starts)) == 64
    assert starts[0] < 20_000 and starts[-1] > 80_000
    assert starts[:4] == [600, 3400, 5400, 6100]  # the same on every machine


def test_choice_is_spread_when_all_is_read():
    rows = windows(None, torch.arange(10_000), max_length=100, num_samples=64)
    assert len({row[0] for row in rows}) == 64 and max(row[0] for row in rows) > 9000


def test_choice_is_spread_over_documents():
    documents = [torch.full((1000,), i) for i in range(40)]
    rows = windows(None, documents, max_length=100, num_samples=64)
    assert len({row[0] for row in rows}) > 25


def test_fewer_than_num_samples_are_all_used():
    documents = [ids_of(50, i) for i in range(20)]
    assert sorted(windows(None, documents, num_samples=128)) == sorted(documents)


class CountingTokenizer:
    chat_template = None
    bos_token_id = pad_token_id = eos_token_id = None

    def __init__(self):
        self.chars = 0

    def __call__(self, text, **kwargs):
        self.chars += len(text)
        return {"input_ids": PLAIN(text)["input_ids"]}


def test_huge_texts_are_not_tokenized_whole():
    tokenizer = CountingTokenizer()
    text = words(500_000)
    rows = windows(tokenizer, text, max_length=100, num_samples=20)
    assert len(rows) == 20 and tokenizer.chars < len(text) / 50
    assert all(len(row) == 100 and UNK not in row for row in rows)  # cut between words
    lengths = [1_000_000] + [20] * 63  # the long one alone can fill what is asked for
    rows = windows(CountingTokenizer(), [words(length) for length in lengths], max_length=100, num_samples=200)
    assert len(rows) == 200


def test_large_datasets_are_not_read_whole():
    dataset = StubDataset([{"text": words(100, i)} for i in range(20_000)])
    rows = windows(PLAIN, dataset, max_length=100, num_samples=16)
    assert len(rows) == 16 and dataset.read < 500


def test_weights_share_num_samples():
    a, b, c = (torch.full((10_000,), value) for value in (1, 2, 3))
    rows = windows(None, [a, [c], b], weights=(0.5, 0.2, 0.3), max_length=50, num_samples=10)
    assert [sum(row[0] == value for row in rows) for value in (1, 3, 2)] == [5, 2, 3]
    packed = load_batches(CalibrationData([a, b], weights=(3, 1), max_length=50, num_samples=8, packing=True, holdout=0))
    rows = torch.cat([batch.inputs["input_ids"] for batch in packed.train])
    assert [(rows == value).all(1).sum().item() for value in (1, 2)] == [6, 2]


@pytest.mark.parametrize("packing", [False, True])
def test_held_out_sequences_are_apart(packing):
    documents = [[i] * 20 for i in range(160)]
    batches = load_batches(CalibrationData(documents, max_length=100, num_samples=32, packing=packing))
    read = documents_of if packing else rows_of
    train, holdout = ({row[0] for row in read(part)} for part in (batches.train, batches.holdout))
    assert not train & holdout
    num_rows = [sum(len(batch.inputs["input_ids"]) for batch in part) for part in (batches.train, batches.holdout)]
    assert num_rows == [30, 2]
    assert batches.num_tokens == (30 * 100 if packing else 30 * 20)


def test_number_of_held_out_sequences():
    def count(num_documents, **kwargs):
        batches = load_batches(settings([ids_of(80, i) for i in range(num_documents)], **kwargs))
        return len(rows_of(batches.train)), len(rows_of(batches.holdout))

    assert count(1, holdout=1 / 16) == (1, 0)
    assert count(2, holdout=1 / 16) == (1, 1)
    assert count(2, holdout=0.9) == (1, 1)
    assert count(64, holdout=1 / 16) == (60, 4)
    assert count(64, holdout=0) == (64, 0)
    assert count(64, holdout=0.5, num_samples=1) == (1, 0)
    packed = load_batches(CalibrationData([ids_of(20, i) for i in range(64)], max_length=100, num_samples=2, holdout=0.9))
    assert packed.train and packed.holdout


# ---------------------------------------------------------------------------------------------------------- padding, batches


def test_padded_rows():
    batches = load_batches(settings([ids_of(40), ids_of(36), ids_of(40, 9)]), PLAIN, tiny_llama())
    (batch,) = batches.train
    assert batch.inputs.keys() == {"input_ids", "attention_mask"}
    assert batch.inputs["input_ids"][-1].tolist() == ids_of(36) + [PAD] * 4
    assert torch.equal(batch.inputs["attention_mask"], batch.mask.long())
    assert batch.mask.sum(1).tolist() == [40, 40, 36] and batches.num_tokens == 116
    assert all(value.dtype == torch.int64 for value in batch.inputs.values())


def test_rows_of_one_length_have_no_mask():
    (batch,) = load_batches(settings([ids_of(40), ids_of(40, 1)])).train
    assert batch.inputs.keys() == {"input_ids"} and batch.mask is None


def test_rows_of_similar_length_share_a_batch():
    lengths = [5, 6, 100, 7, 90, 99, 3, 50, 95, 98] * 5
    batches = load_batches(settings([ids_of(length) for length in lengths], batch_tokens=800)).train
    sizes = [batch.inputs["input_ids"].numel() for batch in batches]
    assert max(sizes) <= 800 and sum(sizes) < 1.15 * sum(lengths)
    assert sorted(map(len, rows_of(batches))) == sorted(lengths)


def test_batch_of_one_row_may_exceed_batch_tokens():
    batches = load_batches(settings([ids_of(100, i) for i in range(3)], batch_tokens=10)).train
    assert [tuple(batch.inputs["input_ids"].shape) for batch in batches] == [(1, 100)] * 3


def test_pad_id_has_an_embedding():
    tokenizer = make_tokenizer()
    tokenizer.pad_token_id, tokenizer.eos_token_id = 107, 106
    for vocab_size, pad_id in ((128, 107), (107, 106), (106, 0)):
        (batch,) = load_batches(settings([[5] * 40, [6] * 39]), tokenizer, tiny_llama(vocab_size=vocab_size)).train
        assert batch.inputs["input_ids"][1, -1] == pad_id


@torch.no_grad()
def test_padding_does_not_change_the_real_tokens():
    model = tiny_llama()
    (batch,) = load_batches(settings([ids_of(40), ids_of(35, 3)]), PLAIN, model).train
    logits = model(**batch.inputs).logits
    torch.testing.assert_close(logits[1, :35], model(torch.tensor([ids_of(35, 3)])).logits[0], atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------------ packing


def tiny_gemma3():
    config = Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=128,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).eval()


def tiny_gpt_oss():
    config = GptOssConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=128,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def tiny_bert():
    return BertForMaskedLM(BertConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)).eval()


SHORT = [ids_of(length, start) for start, length in enumerate([1, 7, 12, 20, 3, 30, 16, 25, 9, 18, 1])]


@torch.no_grad()
@pytest.mark.parametrize("make_model", [tiny_llama, tiny_gemma3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_have_the_logits_they_have_alone(make_model, attention):
    model = make_model()
    model.set_attn_implementation(attention)
    (batch,) = load_batches(settings(SHORT, max_length=50, packing=None), PLAIN, model).train
    assert batch.inputs.keys() == {"input_ids", "position_ids"} and batch.inputs["input_ids"].shape == (3, 50)
    assert sorted(documents_of([batch])) == sorted(SHORT)
    logits = model(**batch.inputs, use_cache=False).logits
    packed = [row[keep] for row, keep in zip(logits, batch.mask, strict=True)]
    alone = [model(torch.tensor([ids])).logits[0] for ids in documents_of([batch])]
    torch.testing.assert_close(torch.cat(packed), torch.cat(alone), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_packing_needs_use_cache_false():
    model = tiny_llama()
    (batch,) = load_batches(settings(SHORT, max_length=50, packing=True), PLAIN, model).train
    alone = model(torch.tensor([documents_of([batch])[1]])).logits[0]
    start = len(documents_of([batch])[0])
    cached = model(**batch.inputs, use_cache=True).logits[0, start : start + len(alone)]
    assert not torch.allclose(cached, alone, atol=1e-2)  # if this fails, Batch's docstring can do without its warning


def is_packed(source, model=None, **kwargs):
    inputs = load_batches(settings(source, packing=None, **kwargs), PLAIN, model).train[0].inputs
    return "position_ids" in inputs


def test_when_to_pack():
    short, long = [ids_of(50, i) for i in range(8)], [ids_of(51, i) for i in range(8)]
    assert is_packed(short, max_length=100) and not is_packed(long, max_length=100)
    assert not is_packed([ids_of(80)], max_length=200)
    assert is_packed(short, tiny_llama(), max_length=100)
    for model in (tiny_gpt_oss(), tiny_bert(), tiny_t5(), tiny_llama().to("meta"), torch.nn.Linear(1, 1)):
        assert not is_packed(short, model, max_length=100)
    batches = load_batches(settings(short, packing=True), None, tiny_llama().to("meta"))  # cannot be asked: believed
    assert "position_ids" in batches.train[0].inputs


class EncoderDecoder(torch.nn.Module):
    config = types.SimpleNamespace(is_encoder_decoder=True)

    def forward(self, input_ids, position_ids, decoder_input_ids, use_cache):
        raise AssertionError("must not be asked whether it keeps packed documents apart")


def test_encoder_decoders_are_not_packed():
    assert not is_packed([ids_of(50, i) for i in range(8)], EncoderDecoder(), max_length=100)


def test_packing_that_would_mix_documents_is_an_error():
    with pytest.raises(
        ValueError, match="packing=True, but packed documents see each other in GptOssForCausalLM; set packing=False"
    ):
        load_batches(settings(SHORT, packing=True), None, tiny_gpt_oss())


def test_full_rows_need_no_mask():
    (batch,) = load_batches(settings([ids_of(25, i) for i in range(8)], max_length=100, packing=True)).train
    assert batch.mask is None and batch.inputs["position_ids"][0].tolist() == [*range(25)] * 4


# ---------------------------------------------------------------------------------------------- encoders, encoder-decoders


def tiny_t5():
    config = T5Config(d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, vocab_size=128, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).eval()


@torch.no_grad()
def test_encoder_decoders_get_decoder_inputs():
    model = tiny_t5()
    (batch,) = load_batches(settings([ids_of(40), ids_of(35, 3)]), PLAIN, model).train
    assert batch.inputs["decoder_input_ids"][0].tolist() == [0, *ids_of(39)]
    assert batch.inputs["decoder_input_ids"][1, :35].tolist() == [0, *ids_of(34, 3)]
    assert torch.equal(batch.inputs["decoder_attention_mask"], batch.inputs["attention_mask"])
    logits = model(**batch.inputs).logits
    row = torch.tensor([ids_of(35, 3)])
    alone = model(input_ids=row, decoder_input_ids=torch.tensor([[0, *ids_of(34, 3)]])).logits
    torch.testing.assert_close(logits[1, :35], alone[0], atol=1e-5, rtol=1e-5)
    given = {"input_ids": torch.ones(2, 40, dtype=torch.long)}
    assert "decoder_input_ids" in load_batches([given], None, model).train[0].inputs
    assert "decoder_input_ids" not in load_batches([given | {"labels": given["input_ids"]}], None, model).train[0].inputs


@torch.no_grad()
def test_encoders_are_padded():
    model = tiny_bert()
    (batch,) = load_batches(settings([ids_of(40), ids_of(35, 3)], packing=None), PLAIN, model).train
    assert batch.inputs.keys() == {"input_ids", "attention_mask"}
    assert model(**batch.inputs).logits.shape == (2, 40, 30522)


# ------------------------------------------------------------------------------------------------------------ ready batches


def given_batch(rows=2, length=40, **extra):
    return {"input_ids": torch.arange(rows * length).view(rows, length) % 100} | extra


def test_dicts_of_tensors_are_taken_as_they_are():
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 30:] = 0
    given = given_batch(attention_mask=mask, token_type_ids=torch.zeros(2, 40, dtype=torch.long))
    batches = load_batches(given, None, tiny_llama())
    assert batches.train[0].inputs == given and torch.equal(batches.train[0].mask, mask.bool())
    assert batches.holdout == [] and batches.num_tokens == 70
    encoded = PLAIN([words(40), words(50)], return_tensors="pt", padding=True)
    assert load_batches(encoded).num_tokens == 90
    images = load_batches([{"pixel_values": torch.rand(2, 3, 4, 4)}] * 4)
    assert images.train[0].mask is None and images.num_tokens == 6 and len(images.holdout) == 1


def test_number_of_given_batches():
    batches = load_batches(CalibrationData([given_batch(4, 40, index=torch.full((4,), i)) for i in range(50)], num_samples=32))
    indices = [batch.inputs["index"][0].item() for batch in batches.train + batches.holdout]
    assert len(set(indices)) == 8 and max(indices) > 25 and len(batches.holdout) == 1


def test_data_loader():
    read = []

    def collate(samples):
        read.append(samples)
        return {"input_ids": torch.stack(samples)}

    loader = DataLoader([torch.tensor(ids_of(40, i)) for i in range(100)], batch_size=4, collate_fn=collate)
    batches = load_batches(CalibrationData(loader, num_samples=12))
    assert len(batches.train) == 2 and len(batches.holdout) == 1 and len(read) == 3
    with pytest.raises(ValueError, match="calibration is empty: the DataLoader yields no batch"):
        load_batches(DataLoader([]))


def test_given_batches_must_be_dicts_of_tensors():
    with pytest.raises(TypeError, match=r"must be a dict of tensors, .*, got \['text'\]"):
        load_batches([given_batch(text=["w1"])])
    with pytest.raises(TypeError, match=r"must be a dict of tensors, .*, got \['list'\]"):
        load_batches(DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 40)), batch_size=2))


# ------------------------------------------------------------------------------------------------------ the chat warning


def test_texts_for_a_chat_model_warn():
    with pytest.warns(
        UserWarning, match="the tokenizer has a chat template, but calibration holds no chats; .* give chats"
    ) as seen:
        load_batches(TEXTS, CHAT)
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="calibration holds no chats"):
        load_batches([f"<s> {text}" for text in TEXTS], CHAT)


@pytest.mark.parametrize(
    ("source", "tokenizer"),
    [
        ([TEXTS[0], MESSAGES], CHAT),
        ([CHAT.apply_chat_template(MESSAGES, tokenize=False)], CHAT),
        ([ids_of(80)], CHAT),
        (given_batch(), CHAT),
        (TEXTS, WITH_BOS),
    ],
)
def test_no_warning_without_reason(source, tokenizer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_batches(source, tokenizer)


# ------------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"max_length": 1}, "max_length must be at least 2, got 1"),
        ({"batch_tokens": 0}, "batch_tokens must be at least 1, got 0"),
        ({"holdout": 1.0}, "holdout must be a share, 0 <= holdout < 1, got 1.0"),
        ({"holdout": -0.1}, "holdout must be a share, .* got -0.1"),
        ({"weights": (1.0,)}, r"weights=\(1.0,\) needs a list of 1 sources, one for each, got 2"),
        ({"weights": (1.0, 0.0)}, r"weights must be positive, got \(1.0, 0.0\)"),
        ({"weights": (1.0, float("nan"))}, "weights must be positive"),
    ],
)
def test_settings_out_of_range(kwargs, message):
    with pytest.raises(ValueError, match=message):
        CalibrationData(TEXTS, **kwargs)


def test_weights_need_a_list_and_enough_samples():
    with pytest.raises(ValueError, match="needs a list of 2 sources, one for each, got str"):
        CalibrationData("text", weights=(1, 1))
    with pytest.raises(ValueError, match=r"num_samples=2 leaves a source of weights=\(9, 1\) without any; raise num_samples"):
        load_batches(CalibrationData([TEXTS, TEXTS], weights=(9, 1), num_samples=2), PLAIN)


def test_nothing_given():
    with pytest.raises(ValueError, match="calibration is None; give texts, chats"):
        load_batches(None)
    for source in ([], ()):
        with pytest.raises(ValueError, match="calibration is empty: "):
            load_batches(source, PLAIN)
    for source in ("", ["", None]):
        with pytest.raises(ValueError, match="calibration has no tokens, at least 64 are needed"):
            load_batches(source, PLAIN)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "folder"])
def test_empty_files_are_named(tmp_path, name):
    path = tmp_path / name
    path.touch() if path.suffix else path.mkdir()
    with pytest.raises(ValueError, match=f"calibration is empty: .*{name}"):
        load_batches(path, PLAIN)


def test_too_few_tokens():
    with pytest.raises(ValueError, match="calibration has 63 tokens, at least 64 are needed"):
        load_batches(words(63), PLAIN)
    with pytest.raises(ValueError, match="calibration has 60 tokens, at least 64 are needed"):
        load_batches(CalibrationData(words(1000), num_samples=3, max_length=20), PLAIN)
    with pytest.raises(ValueError, match="calibration has 32 tokens, at least 64 are needed"):
        load_batches([given_batch(2, 16)])


@pytest.mark.parametrize("name", ["nowhere.txt", "my data.jsonl", "/no/such/place", "./nowhere", "owner/name", "~/x"])
def test_missing_paths_are_named(name):
    with pytest.raises(FileNotFoundError, match=rf"calibration='{name}' does not exist; .* datasets\.load_dataset"):
        load_batches(name, PLAIN)


def test_texts_need_a_tokenizer():
    with pytest.raises(ValueError, match="calibration holds texts, which need a tokenizer: pass tokenizer=, or give token ids"):
        load_batches(TEXTS)


def test_unknown_records_list_their_columns():
    with pytest.raises(ValueError, match=r"record 0 of calibration has the columns body, title; known are messages; .* column="):
        load_batches([{"body": "w1", "title": "w2"}], PLAIN)
    with pytest.raises(ValueError, match="column='body' is not in record 0 of calibration; its columns are id, text"):
        load_batches(CalibrationData(RECORDS[:1], column="body"), PLAIN)


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "w1"}\n\n{"text": "w1"\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:3: not JSON .*; each line must be one JSON value"):
        load_batches(tmp_path / "a.jsonl", PLAIN)
    (tmp_path / "a.json").write_text('[\n"w1",\n}')
    with pytest.raises(ValueError, match=r"a\.json:3: not JSON"):
        load_batches(tmp_path / "a.json", PLAIN)
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text"):
        load_batches(tmp_path / "a.txt", PLAIN)
    (tmp_path / "a.xml").write_text("w1")
    with pytest.raises(ValueError, match=r"a\.xml' must be one of \.txt \.jsonl \.json \.csv \.parquet, or a folder of them"):
        load_batches(tmp_path / "a.xml", PLAIN)


def test_splits_must_be_chosen(tmp_path):
    with pytest.raises(ValueError, match="calibration is a set of splits; give one of them: train, test"):
        load_batches({"train": StubDataset(RECORDS), "test": StubDataset(RECORDS)}, PLAIN)
    (tmp_path / "dataset_dict.json").touch()
    with pytest.raises(ValueError, match="holds the splits of a data set; give the folder of one of them"):
        load_batches(tmp_path, PLAIN)


@pytest.mark.parametrize("source", [3, object(), {"text": "w1"}, {"w1"}])
def test_unsupported_sources(source):
    with pytest.raises(TypeError, match=f"calibration must be texts, .*, got {type(source).__name__}"):
        load_batches(source, PLAIN)


@pytest.mark.parametrize(
    ("sample", "got"),
    [
        (3, "int"),
        (["w1"], "list"),
        ([[1, 2]], "list"),
        (torch.tensor(3), r"a tensor of torch.int64, shape \(\)"),
        (torch.ones(3), r"a tensor of torch.float32, shape \(3,\)"),
        ({"input_ids": torch.ones(2, 3, 4, dtype=torch.long)[0, 0] > 0}, "a tensor of torch.bool"),
    ],
)
def test_unsupported_samples(sample, got):
    with pytest.raises(TypeError, match=f"sample 0 of calibration must be a text, .*, got {got}"):
        load_batches([sample], PLAIN)


@pytest.mark.parametrize("token", [-1, 128])
def test_token_ids_outside_the_vocabulary(token):
    documents = [ids_of(30, i) for i in range(8)] + [[token] * 8]
    for source in (documents, [{"input_ids": torch.tensor([ids_of(80), [token] * 80])}]):
        with pytest.raises(
            ValueError, match=rf"token id {token}, which is not in the vocabulary .*vocab_size=128\); use the model's"
        ):
            load_batches(source, None, tiny_llama())


def test_max_length_of_the_model():
    model = tiny_llama()
    with pytest.raises(
        ValueError, match="max_length=257 is more than max_position_embeddings=256 of LlamaForCausalLM; set max_length=256"
    ):
        load_batches(CalibrationData(TEXTS, max_length=257), PLAIN, model)
    batches = load_batches(words(2000), PLAIN, model)  # nobody asked for the default's 512
    assert max(batch.inputs["input_ids"].shape[1] for batch in batches.train) == 256


def test_batches_are_frozen():
    batch = load_batches(TEXTS, PLAIN).train[0]
    assert isinstance(batch, Batch)
    with pytest.raises(AttributeError):
        batch.mask = None
