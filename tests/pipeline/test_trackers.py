"""TensorBoard and MLflow hear the same events as the screen, and are tested against the real packages."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from inlay.pipeline.trackers import list_settings, open_trackers
from inlay.settings import DataConfig, FitSettings, MethodConfig, RunConfig, TrainConfig
from inlay.training import emit_to, fit, make_run
from toys import make_toy_task


def train(backbone, folder: Path, names: list[str], seeds: tuple[int, ...] = (0,), **settings):
    task, known = make_toy_task(), {"lr": 1e-2, "epochs": 3, "batch_size": 16, "max_length": 24}
    configs = [RunConfig(method=MethodConfig("pfeiffer", 4), train=TrainConfig(seed=seed, **known)) for seed in seeds]
    runs = [make_run(task, config, backbone) for config in configs]
    return runs, fit(runs, backbone, folder, FitSettings(**settings), emit_to(*open_trackers(names, folder)))


def test_tensorboard_reads_every_epoch_of_every_run(tiny_bert, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs, results = train(tiny_bert, tmp_path, ["tensorboard"], (0, 1))
    for run, result in zip(runs, results, strict=True):
        read = EventAccumulator(str(tmp_path / run.id / "tensorboard"))
        read.Reload()
        points = read.Scalars("dev/accuracy")
        assert [point.step for point in points] == [line["step"] for line in result.history]
        assert [point.value for point in points] == pytest.approx([line["dev"]["accuracy"] for line in result.history])
        assert {"train/loss", "train/seconds"} <= set(read.Tags()["scalars"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of sqlalchemy, in MLflow
def test_mlflow_has_settings_and_scores_and_no_text(tiny_bert, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    uri = (
        f"sqlite:///{tmp_path}/mlflow.db" if find_spec("sqlalchemy") and find_spec("alembic") else str(tmp_path / "ml")
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    (run,), (result,) = train(tiny_bert, tmp_path, ["mlflow"])
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("inlay")
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.data.tags["inlay.run"] == run.id
    assert logged.info.status == "FINISHED"
    assert logged.data.params["train.lr"] == "0.01"
    points = client.get_metric_history(logged.info.run_id, "dev/accuracy")
    assert [point.step for point in points] == [line["step"] for line in result.history]
    texts = " ".join(logged.data.params.values())
    assert not any(text in texts for text in run.task.train.texts)


def test_what_signs_a_link_is_not_logged():
    config = RunConfig(task="mail", data=DataConfig("https://data.test/mail.csv?signature=secret"))
    settings = list_settings(SimpleNamespace(name="mail", config=config))
    assert settings["data.source"] == "https://data.test/mail.csv"
    assert "secret" not in str(settings)
