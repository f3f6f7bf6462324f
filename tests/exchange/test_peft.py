"""Inlay against the `peft` library itself: equal weights give equal logits and, for LoRA and LN tuning, gradients."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import transformers

from inlay.data.tasks import Split
from inlay.errors import BadData, Unsupported, WrongBackbone
from inlay.exchange import ImportOptions, export_folder, import_folder
from inlay.exchange.peft import _find_scale
from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import SlotSpec
from inlay.model.batch.route import collate
from inlay.model.heads.heads import HeadSpec
from inlay.settings.run_config import MethodConfig
from inlay.store import Store
from inlay.training.evaluate import encode_rows
from predicted import predict_split

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

pytestmark = [
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),  # PEFT's, of every layer norm
    pytest.mark.filterwarnings("ignore:Adapter 'default'"),  # PEFT's, of its own biases
]
LORA, IA3, NORMS = peft.LoraConfig, peft.IA3Config, peft.LNTuningConfig
# name of the case -> PEFT's config class and settings, by BERT's and RoBERTa's module names
TRAINED: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (LORA, {"r": 4, "lora_alpha": 10, "target_modules": ["query", "value"]}),
    "default": (LORA, {}),
    "regex": (LORA, {"r": 2, "target_modules": r".*layer\.[02]\..*\.(key|query)"}),
    "rslora": (LORA, {"r": 4, "use_rslora": True, "target_modules": ["key", "intermediate.dense", "output.dense"]}),
    "some-layers": (LORA, {"target_modules": ["query"], "layers_to_transform": [1], "layers_pattern": "layer"}),
    "patterns": (
        LORA,
        {
            "target_modules": ["query", "value"],
            "rank_pattern": {"query": 3, r"layer\.1\..*\.value": 5},
            "alpha_pattern": {"value": 20},
        },
    ),
    "ragged": (LORA, {"target_modules": r".*(layer\.0\..*query|layer\.2\..*value)"}),
    "dora": (LORA, {"r": 4, "lora_alpha": 10, "use_dora": True, "target_modules": ["query", "value"]}),
    "dora-ragged": (LORA, {"use_dora": True, "target_modules": r".*(layer\.0\..*query|layer\.2\..*value)"}),
    "dropout": (LORA, {"lora_dropout": 0.3, "target_modules": ["query"]}),
    "ia3": (IA3, {}),
    "ia3-outputs": (IA3, {"target_modules": ["key", "intermediate.dense"], "feedforward_modules": []}),
    "ln-tuning": (NORMS, {"target_modules": ["LayerNorm"]}),
    "ln-some": (NORMS, {"target_modules": r".*layer\.1\..*LayerNorm"}),
}
CASES = [("bert", case) for case in TRAINED] + [("roberta", case) for case in TRAINED]
CASES += [("xlm-roberta", "lora"), ("camembert", "ln-tuning"), ("mpnet", "ln-tuning")]


def open_base(folder: Any, num_labels: int = 3) -> Any:
    """transformers' own classifier on a tiny backbone; its head starts at random."""
    torch.manual_seed(1)
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=num_labels, attn_implementation="eager"
    )


def shake(model: Any) -> None:
    """Move everything that is trained away from where it started."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))


def train_in_peft(folder: Any, config: Any, *, steps: int = 3, inputs: Any = None) -> Any:
    model = peft.get_peft_model(open_base(folder), config)
    shake(model)
    if inputs is not None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for _ in range(steps):
            labels = torch.arange(len(inputs["input_ids"])) % 3
            loss = model(**inputs, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def make_inputs(backbone: Any, texts: list[str]) -> dict[str, torch.Tensor]:
    return dict(backbone.tokenizer(texts, padding=True, return_tensors="pt"))


def infer_version(store: Store, version: Any, backbone: Any, texts: list[str]) -> torch.Tensor:
    loaded = store.load(version)
    spec = SlotSpec.from_stored(loaded.manifest.method, loaded.manifest.head)
    return torch.stack(predict_split(spec, loaded.tensors, backbone, Split(texts, None, None, []), 64))


@pytest.mark.parametrize(("family", "case"), CASES)
def test_trained_in_peft_gives_the_same_logits_in_inlay(family, case, backbone_folder, backbone_of, texts, tmp_path):
    kind, settings = TRAINED[case]
    backbone, store = backbone_of(family), Store(tmp_path / "store")
    inputs = make_inputs(backbone, texts)
    model = train_in_peft(backbone_folder(family), kind(task_type="SEQ_CLS", **settings), inputs=inputs)
    model.save_pretrained(tmp_path / "folder", safe_serialization=case != "dropout")
    with torch.no_grad():
        expected = model(**inputs).logits
    imported = import_folder(tmp_path / "folder", backbone, store, ImportOptions(name="task"))
    logits = infer_version(store, imported.version, backbone, texts)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert logits.std(0).min() > 1e-4, "rows that all get the same answer prove nothing"


def test_trained_pooler_comes_along(backbone_folder, tiny_bert, texts, tmp_path):
    config = LORA(task_type="SEQ_CLS", modules_to_save=["pooler"])
    inputs, store = make_inputs(tiny_bert, texts), Store(tmp_path / "store")
    model = train_in_peft(backbone_folder("bert"), config, inputs=inputs)
    model.save_pretrained(tmp_path / "folder")
    imported = import_folder(tmp_path / "folder", tiny_bert, store, ImportOptions(name="task"))
    with torch.no_grad():
        torch.testing.assert_close(
            infer_version(store, imported.version, tiny_bert, texts), model(**inputs).logits, rtol=1e-5, atol=1e-5
        )


POOLER, HIDDEN = HeadSpec("classify", 3, "pooler"), HeadSpec("multilabel", 3, "cls", hidden="tanh")
NUMBER = HeadSpec("regress", 1, "pooler", target_mean=5.0, target_std=3.0)
LEAVING = {
    "lora": MethodConfig("lora", 4, alpha=6.0, linears=("query", "value", "expand", "contract")),
    "lora-part": MethodConfig("lora", 3, linears=("project",), layers="1:"),
    "dora": MethodConfig("dora", 4, alpha=6.0, linears=("query", "value", "expand", "contract")),
    "ia3": MethodConfig("ia3"),
    "ia3-all": MethodConfig("ia3", linears=("query", "key", "value", "project", "expand", "contract"), layers="0,2"),
    "norms": MethodConfig("norms"),
    "norms-encoder": MethodConfig("norms", norms="encoder"),
}
LEAVING_CASES = [("bert", case, head) for case in LEAVING for head in (POOLER, HIDDEN, NUMBER)]
LEAVING_CASES += [(family, case, HIDDEN) for family in ("roberta", "mpnet") for case in LEAVING]


@pytest.mark.parametrize(("family", "case", "head"), LEAVING_CASES)
def test_exported_from_inlay_gives_the_same_logits_in_peft(
    family, case, head, backbone_folder, backbone_of, publish_random, texts, tmp_path
):
    backbone, store = backbone_of(family), Store(tmp_path / "store")
    version = publish_random(store, "task", backbone, SlotSpec.of(LEAVING[case], head))
    export_folder("task", store, backbone, "peft", tmp_path / "folder")
    base = open_base(backbone_folder(family), head.num_outputs)
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "folder")).eval()
    with torch.no_grad():
        theirs = model(**make_inputs(backbone, texts)).logits
    ours = infer_version(store, version, backbone, texts)
    torch.testing.assert_close(theirs, ours * head.target_std + head.target_mean, rtol=1e-5, atol=1e-5)
    assert ours.std(0).min() > 1e-4, "rows that all get the same answer prove nothing"


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("case", ["lora", "rslora", "dora", "ln-tuning"])
def test_gradients_equal_those_of_peft(family, case, backbone_folder, backbone_of, texts, tmp_path):
    kind, settings = TRAINED[case]
    backbone, store = backbone_of(family), Store(tmp_path / "store")
    model = train_in_peft(backbone_folder(family), kind(task_type="SEQ_CLS", **settings))
    model.save_pretrained(tmp_path / "folder")
    imported = import_folder(tmp_path / "folder", backbone, store, ImportOptions(name="task"))
    loaded = store.load(imported.version)
    targets = torch.arange(len(texts)) % 3
    torch.nn.functional.cross_entropy(model(**make_inputs(backbone, texts)).logits, targets).backward()
    theirs = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}

    bank = Bank(backbone, 1, trainable=True)
    bank.put(0, SlotSpec.from_stored(loaded.manifest.method, loaded.manifest.head), loaded.tensors)
    batch = collate(encode_rows(backbone, Split(texts, None, None, []), 64), backbone.pad_id, backbone.device)
    with bank.routed(batch.route):
        (logits,) = bank.logits(batch)
        torch.nn.functional.cross_entropy(logits, targets[list(batch.order)]).backward()
    num_compared = 0
    for name, gradient in own_gradients(bank, loaded.tensors).items():
        found = find_gradient(name, theirs, backbone)
        torch.testing.assert_close(gradient, found, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        num_compared += 1
    assert num_compared == len(loaded.tensors)


def own_gradients(bank: Bank, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of slot 0, at the slot's own size."""
    corners = {name: tuple(slice(0, size) for size in tensor.shape) for name, tensor in tensors.items()}
    return {name: bank.stacks[name].grad[0][corner] for name, corner in corners.items()}


def find_gradient(name: str, theirs: dict[str, torch.Tensor], backbone: Any) -> torch.Tensor:
    """PEFT's gradient of what a slot calls `name`, in the slot's orientation."""
    kind, _, rest = name.partition(".")
    key, _, item = rest.rpartition(".")
    paths = {f"lora.{site.key}": site.path for site in backbone.anatomy.linears}
    paths |= {f"dora.{site.key}": site.path for site in backbone.anatomy.linears}
    paths |= {f"norm.{site.key}": site.path for site in backbone.anatomy.norms}
    ends = {
        "lora": {"down": "lora_A.weight", "up": "lora_B.weight"},
        "dora": {"down": "lora_A.weight", "up": "lora_B.weight", "magnitude": "lora_magnitude_vector.weight"},
        "norm": {"scale": "ln_tuning_layers.weight", "shift": "ln_tuning_layers.bias"},
    }
    if kind == "head":
        is_hidden = key == "hidden"
        names = [full for full in theirs if "modules_to_save" in full and full.endswith(f".{item}")]
        (found,) = [full for full in names if ("dense" in full) == is_hidden]
        return theirs[found]
    end = f"{paths[f'{kind}.{key}']}.{ends[kind][item]}"
    (gradient,) = [value for full, value in theirs.items() if full.endswith(f".{end}")]
    return gradient.T if item in ("down", "up") else gradient


def save_lora(folder: Any, target: Any, **settings: Any) -> None:
    """A PEFT folder on a tiny backbone."""
    train_in_peft(folder, LORA(task_type="SEQ_CLS", **settings)).save_pretrained(target)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "biases": ({"bias": "all"}, Unsupported, "`bias` is `all`"),
    "bias in the update": ({"lora_bias": True}, Unsupported, "`lora_bias`"),
    "pooler": ({"target_modules": ["query", "pooler.dense"]}, Unsupported, "no place for the tensor .*pooler"),
    "embeddings": ({"target_modules": ["word_embeddings"]}, BadData, "no `lora_A.weight` at any linear layer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_inlay_cannot_do_exactly_is_refused_by_name(case, backbone_folder, tiny_bert, tmp_path):
    settings, error, words = REFUSED[case]
    save_lora(backbone_folder("bert"), tmp_path / "folder", **settings)
    with pytest.raises(error, match=words) as raised:
        import_folder(tmp_path / "folder", tiny_bert, Store(tmp_path / "store"), ImportOptions())
    assert raised.value.hint
    assert not (tmp_path / "store" / "objects").exists()


def test_other_methods_of_peft_are_refused_by_name(backbone_folder, tiny_bert, tmp_path):
    config = peft.LoHaConfig(task_type="SEQ_CLS", target_modules=["query"])
    train_in_peft(backbone_folder("bert"), config).save_pretrained(tmp_path / "folder")
    with pytest.raises(Unsupported, match="PEFT's method `LOHA`"):
        import_folder(tmp_path / "folder", tiny_bert, Store(tmp_path / "store"), ImportOptions())


def test_head_of_a_token_classifier_is_refused(backbone_folder, tiny_bert, tmp_path):
    base = transformers.AutoModelForTokenClassification.from_pretrained(backbone_folder("bert"), num_labels=3)
    config = LORA(task_type="TOKEN_CLS", target_modules=["query"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "folder")
    with pytest.raises(Unsupported, match="`TOKEN_CLS`, which does not say"):
        import_folder(tmp_path / "folder", tiny_bert, Store(tmp_path / "store"), ImportOptions())


def test_adapter_without_a_head_is_refused(backbone_folder, tiny_bert, tmp_path):
    base = transformers.AutoModel.from_pretrained(backbone_folder("bert"))
    peft.get_peft_model(base, LORA(target_modules=["query"])).save_pretrained(tmp_path / "folder")
    with pytest.raises(Unsupported, match="without a classifier"):
        import_folder(tmp_path / "folder", tiny_bert, Store(tmp_path / "store"), ImportOptions())


@pytest.mark.parametrize("family", ["distilbert", "electra", "deberta-v2"])
def test_head_that_no_head_of_inlay_is_like_is_refused(family, backbone_folder, backbone_of, tmp_path):
    targets = {"distilbert": ["v_lin"], "electra": ["value"], "deberta-v2": ["value_proj"]}[family]
    save_lora(backbone_folder(family), tmp_path / "folder", target_modules=targets)
    with pytest.raises(Unsupported, match=f"family `{family}` has a (relu|gelu) layer"):
        import_folder(tmp_path / "folder", backbone_of(family), Store(tmp_path / "store"), ImportOptions())


def test_another_backbone_is_refused(backbone_folder, backbone_of, tmp_path):
    save_lora(backbone_folder("bert"), tmp_path / "folder", target_modules=["query"])
    with pytest.raises(WrongBackbone, match="in no module of the backbone's family, `roberta`"):
        import_folder(tmp_path / "folder", backbone_of("roberta"), Store(tmp_path / "store"), ImportOptions())


@pytest.mark.parametrize(
    "pattern", ["([a-z0-9._]+)+!", "(a|aa)*b", ".*.*.*.*.*x", "(?=a)a", r"(.)\1", "x" * 201, "([a-z.]{1,9}){1,9}!"]
)
def test_a_pattern_of_names_that_may_match_for_ever_is_refused_at_once(pattern):
    began = time.perf_counter()
    with pytest.raises(BadData, match="alpha_pattern"):
        _find_scale({"lora_alpha": 8, "alpha_pattern": {pattern: 4}}, "encoder.layer.0.attention.self.query", 4)
    assert time.perf_counter() - began < 1


def test_patterns_as_peft_writes_them_are_matched():
    name = "encoder.layer.0.attention.self.query"
    for pattern in (
        "query",
        r".*layer\.[02]\..*\.(key|query)",
        r"encoder\.layer\.0\.attention\.self\.query",
        "^encoder.*",
    ):
        assert _find_scale({"lora_alpha": 8, "alpha_pattern": {pattern: 4}}, name, 4) == 1.0
