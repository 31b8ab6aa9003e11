"""`transformers.Trainer` and `accelerate` under a plan: same losses, checkpoints that go both ways, what is refused."""

import json
import logging

import pytest
import torch
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from planner import BudgetError, OptionError, Plan, PlanWarning, applied_plan, applied_plans, plan
from planner.integrations.trainer import plan_trainer
from planner.runtime.interception import attached

from .measure import peak_of
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")

BUDGET = 0.00266  # GB; a plan has to recompute


class Watched(transformers.TrainerCallback):
    """What was on the model while it trained."""

    def __init__(self):
        self.plans, self.model = [], None

    def on_step_end(self, args, state, control, model=None, **_):
        self.model = model
        runtime = attached(model)
        self.plans = [] if runtime is None else list(runtime.plans.values())
        self.newest = None if runtime is None else applied_plan(self.model).without_batch()


def model():
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_embd=64, n_head=2, vocab_size=96, n_positions=32, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config)


def rows(n):
    ids = torch.randint(0, 96, (n, 32), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(folder, net=None, kind=Trainer, more=None, **arguments):
    given = {"max_steps": 2, "per_device_train_batch_size": 8, "save_strategy": "no", **arguments}
    args = TrainingArguments(
        str(folder), logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, seed=3, **given
    )
    return kind(
        model=model() if net is None else net, args=args, train_dataset=rows(32), eval_dataset=rows(8), **(more or {})
    )


def trained(t, resume=None):
    watched = Watched()
    t.add_callback(watched)
    t.train(resume_from_checkpoint=resume)
    keys = ("loss", "eval_loss", "grad_norm")
    return [{k: entry[k] for k in keys if k in entry} for entry in t.state.log_history], watched


def planned(t, budget=BUDGET, **options):
    assert plan_trainer(t, budget_gb=budget, solver="chen", progress=False, **options) is t
    return t


@pytest.fixture(autouse=True)
def quiet(caplog):
    torch.set_num_threads(1)
    caplog.set_level(logging.WARNING)


@pytest.mark.compat
def test_losses_checkpoints_and_evaluation_are_those_without_a_plan(tmp_path):
    saves = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    saves["gradient_accumulation_steps"] = 2
    usual, _ = trained(trainer(tmp_path / "usual", **saves))
    t = planned(trainer(tmp_path / "ours", **saves))
    ours, watched = trained(t)
    assert ours == usual
    assert len(watched.plans) == 1
    assert watched.plans[0].options.accumulate
    assert any(d.action == "recompute" for d in watched.plans[0].decisions)
    assert attached(t.model) is None
    assert applied_plan(t.model).record is watched.plans[0]
    assert applied_plans(t.model) == (applied_plan(t.model),)

    checkpoint = {name: tmp_path / name / "checkpoint-2" for name in ("usual", "ours")}
    without, _ = trained(trainer(tmp_path / "usual", **saves), checkpoint["ours"])
    t = planned(trainer(tmp_path / "ours", **saves))
    under, watched = trained(t, checkpoint["usual"])
    assert without == under == usual
    assert "plan.json" in watched.plans[0].note  # whose schedule was taken


def test_a_step_of_several_batches_is_planned_anew_when_all_of_it_was_seen(tmp_path):
    """Its first batch shows neither the others nor what the optimizer does."""
    t, anew = trainer(tmp_path, gradient_accumulation_steps=3), []

    class Told(logging.Handler):
        def emit(self, record):
            anew.extend([t.state.global_step] if record.getMessage().startswith("planned anew") else [])

    log, told = logging.getLogger("planner"), Told()
    level = log.level
    log.addHandler(told)
    log.setLevel(logging.INFO)
    try:
        trained(plan_trainer(t, budget_gb=BUDGET, solver="chen"))
    finally:
        log.removeHandler(told)
        log.setLevel(level)
    assert anew == [1]


class Stops(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        raise KeyboardInterrupt


def test_an_interruption_takes_the_plan_off_and_the_trainer_trains_again(tmp_path):
    t, stops = planned(trainer(tmp_path, max_steps=1)), Stops()
    t.add_callback(stops)
    with pytest.raises(KeyboardInterrupt):
        t.train()
    assert attached(t.model) is None
    t.remove_callback(stops)
    _, watched = trained(t)
    assert len(watched.plans) == 1
    assert attached(t.model) is None


@pytest.mark.thorough
def test_all_plans_are_known_after_training_the_largest_first(tmp_path):
    # batches of 8 and of 4; the last of an epoch is still there as the next one begins, which has both planned anew
    t = trainer(tmp_path, model(), max_steps=6)
    t.train_dataset = rows(12)
    _, watched = trained(planned(t, dynamic=False))
    plans = applied_plans(t.model)
    assert [p.record for p in plans] == sorted(watched.plans, key=lambda p: -p.baseline_peak_bytes)
    assert [p.step.batch[0].shape for p in plans] == [(8, 32), (4, 32)]
    assert Plan.load(tmp_path / "plan.json").record.schedule == plans[0].schedule
    assert applied_plan(t.model) is plans[0]
    assert plans[1].summary().startswith("Fits")
    plan(t.model, budget_gb=1).apply()
    assert applied_plan(t.model) is None
    assert applied_plans(t.model) == ()


def test_a_damaged_plan_file_is_planned_anew(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    with pytest.warns(PlanWarning, match=r"plan\.json.*planned anew"):
        trained(planned(trainer(tmp_path, model(), max_steps=1)))
    assert json.loads((tmp_path / "plan.json").read_text())


def test_the_optimizer_and_the_precision_are_the_trainers_own(tmp_path):
    arguments = {"bf16": True, "optim": "sgd", "max_grad_norm": 0.0}
    usual, _ = trained(trainer(tmp_path, **arguments))
    t = planned(trainer(tmp_path, **arguments), plan_file=None)
    ours, watched = trained(t)
    p = watched.plans[0]
    assert p.account["optimizer state"] == 0
    assert any("to_copy" in d.name for d in p.decisions)  # of autocast
    # torch.compile, with or without a plan, rounds some gradients of bfloat16 otherwise
    for mine, theirs in zip(ours, usual, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-2)
    assert not (tmp_path / "plan.json").exists()


def mean_of_losses(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="mean")


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits.float().square().mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    ("kind", "arguments", "more"),
    [
        *more((Trainer, {"label_smoothing_factor": 0.1}, {})),
        (Trainer, {}, {"compute_loss_func": mean_of_losses}),
        *more((Weighted, {}, {})),
    ],
    ids=["label smoothing", "compute_loss_func", "compute_loss"],
)
def test_the_loss_is_the_trainers_own_and_its_peak_is_predicted(tmp_path, kind, arguments, more):
    usual, _ = trained(trainer(tmp_path, model(), kind=kind, more=more, **arguments))
    t = planned(trainer(tmp_path, model(), kind=kind, more=more, **arguments), budget=1, plan_file=None)
    ours, watched = trained(t)
    assert ours == usual
    assert len(watched.plans) == 1
    p = watched.newest
    p.apply()
    batch = {name: torch.stack([row[name] for row in t.train_dataset[:8]]) for name in ("input_ids", "labels")}

    def step():
        t.compute_loss(t.model, dict(batch), num_items_in_batch=torch.tensor(8 * 31)).backward()

    for _ in range(2):  # the first shows the loop, for which the second may be planned anew
        step()
        t.model.zero_grad()
    seen = peak_of(step, tmp_path) + p.resident_bytes
    assert max(p.phase_peaks[phase] for phase in ("forward", "loss", "backward")) == pytest.approx(seen, rel=0.04)


def test_adapters_train_by_a_plan(tmp_path):
    def adapted():
        torch.manual_seed(1)
        return get_peft_model(model(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))

    usual, _ = trained(trainer(tmp_path, adapted()))
    t = planned(trainer(tmp_path, adapted()), budget=1)
    ours, watched = trained(t)
    assert ours == usual
    assert watched.plans[0].account["optimizer state"] < 50_000
    t.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def test_what_would_double_up_is_refused(tmp_path):
    with pytest.raises(OptionError, match="checkpointing=True is set: a plan decides itself what is recomputed"):
        planned(trainer(tmp_path, gradient_checkpointing=True))
    net = model()
    net.gradient_checkpointing_enable()
    with pytest.raises(OptionError, match=r"gradient_checkpointing_enable\(\) is set"):
        planned(trainer(tmp_path, net))
    with pytest.raises(OptionError, match="torch_compile=True is set"):
        planned(trainer(tmp_path, torch_compile=True, torch_compile_backend="eager"))
    with pytest.raises(OptionError, match=r"needs a transformers\.Trainer; it was given a GPT2LMHeadModel"):
        planned(model())
    with pytest.raises(BudgetError, match="budget_gb=-1"):
        planned(trainer(tmp_path), budget=-1)


def test_what_fsdp_does_is_refused(tmp_path, monkeypatch):
    own = trainer(tmp_path)
    for arguments, said in (
        (
            {"activation_checkpointing": True, "fsdp_version": 2},
            "FSDP's activation_checkpointing is set",
        ),
        ({"fsdp_version": 1}, "fsdp_version=1 is set: fsdp_version=2 shards"),
    ):
        plugin = FullyShardedDataParallelPlugin(**arguments)
        monkeypatch.setattr(own.accelerator.state, "fsdp_plugin", plugin, raising=False)
        with pytest.raises(OptionError, match=said):
            planned(own)


@pytest.mark.parametrize("mixed_precision", ["no", *more("bf16")])
def test_accelerate_prepares_a_planned_model_and_a_prepared_one_is_planned(tmp_path, mixed_precision):
    def losses(when):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[f for _ in range(8) for f in (torch.nn.Linear(64, 64), torch.nn.GELU())])
        optimizer = torch.optim.AdamW(net.parameters())
        loader = torch.utils.data.DataLoader(torch.randn(1024, 64), batch_size=256)
        budget_gb = 0.0014 if mixed_precision == "no" else 0.00115
        p = plan(net, budget_gb=budget_gb, optimizer=optimizer, solver="chen", accumulate=True)
        if when == "before":
            p.apply()
        prepared, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        if when == "after":
            p.apply()
        found = []
        for x in loader:
            with accelerator.accumulate(prepared):
                loss = prepared(x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        if when != "never":
            assert any(d.action == "recompute" for d in p.decisions)
            assert accelerator.unwrap_model(prepared) is net
            accelerator.save_model(prepared, tmp_path / when)
        return found

    assert losses("before") == losses("after") == losses("never")
