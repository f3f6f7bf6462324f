"""TensorBoard and MLflow hear the same events as the screen, and are tested against the real packages."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from inlay.errors import InlayError
from inlay.pipeline import trackers
from inlay.pipeline.trackers import list_settings, mask_urls, open_trackers
from inlay.settings import DataConfig, FitSettings, MethodConfig, RunConfig, TrainConfig
from inlay.training import fan_out, fit, make_run
from toys import make_toy_task


def config_of(seed: int) -> RunConfig:
    known = {"lr": 1e-2, "epochs": 3, "batch_size": 16, "max_length": 24}
    return RunConfig(method=MethodConfig("pfeiffer", 4), train=TrainConfig(seed=seed, **known))


def train(backbone, folder: Path, names: list[str], seeds: tuple[int, ...] = (0,), **settings):
    task = make_toy_task()
    runs = [make_run(task, config_of(seed), backbone) for seed in seeds]
    return runs, fit(runs, backbone, folder, FitSettings(**settings), fan_out(*open_trackers(names, folder)))


def test_tensorboard_reads_every_epoch_of_every_run(tiny_bert, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs, results = train(tiny_bert, tmp_path, ["tensorboard"], (0, 1))
    for run, result in zip(runs, results, strict=True):
        read = EventAccumulator(str(tmp_path / run.id / "tensorboard"))
        read.Reload()
        points = read.Scalars("dev/accuracy")
        assert [point.step for point in points] == [line["step"] for line in result.history]
        assert [point.value for point in points] == pytest.approx([line["dev"]["accuracy"] for line in result.history])
        assert {"train/loss", "train/seconds"} <= set(read.Tags()["scalars"])


@pytest.mark.mlflow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of sqlalchemy, in MLflow
def test_mlflow_has_settings_and_scores_and_no_text(tiny_bert, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("mlflow.server.handlers", reason="mlflow-skinny, which has no database")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
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


def test_a_full_disk_ends_the_log_and_not_the_training(tiny_bert, tmp_path, monkeypatch, capsys):
    append, calls = trackers._append_events, []

    def fill_up(file: Path, events) -> None:
        calls.append(file)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        append(file, events)

    monkeypatch.setattr(trackers, "_append_events", fill_up)
    _, (result,) = train(tiny_bert, tmp_path, ["tensorboard"])
    assert result.status == "finished"
    assert len(result.history) == 3
    assert len(calls) == 3, "asked no more after it failed"
    said = capsys.readouterr().err
    assert said.count("no more is logged to tensorboard") == 1
    assert "No space left on device; training goes on without it" in " ".join(said.split())


def test_a_folder_that_cannot_be_written_ends_the_log_and_not_the_training(tiny_bert, tmp_path, capsys):
    run = make_run(make_toy_task(), config_of(0), tiny_bert)
    (tmp_path / run.id).mkdir()
    (tmp_path / run.id / "tensorboard").write_text("a file where the folder should be")
    (result,) = fit([run], tiny_bert, tmp_path, FitSettings(), fan_out(*open_trackers(["tensorboard"], tmp_path)))
    assert result.status == "finished"
    assert "File exists" in capsys.readouterr().err


class FakeMLflow(SimpleNamespace):
    """A tracking server that is gone: from the start, or after so many metrics."""

    def __init__(self, num_answers: int) -> None:
        self.left, self.calls = num_answers, 0
        super().__init__(
            MlflowClient=lambda: self, get_tracking_uri=lambda: "http://me:s3cret@mlflow.test/?token=t0ken"
        )

    def get_experiment_by_name(self, name: str):
        self._answer()
        return SimpleNamespace(experiment_id="1")

    def search_runs(self, *asked, **more):
        return []

    def create_run(self, *asked, **more):
        return SimpleNamespace(info=SimpleNamespace(run_id="7"))

    def log_param(self, *asked) -> None:
        pass

    def log_metric(self, *asked, step: int) -> None:
        self.calls += 1
        self._answer()

    def _answer(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("no answer of http://me:s3cret@mlflow.test/api?token=t0ken (refused)")


def test_a_server_that_goes_away_is_said_once_without_its_password(tiny_bert, tmp_path, monkeypatch, capsys):
    server = FakeMLflow(num_answers=5)
    monkeypatch.setitem(sys.modules, "mlflow", server)
    _, (result,) = train(tiny_bert, tmp_path, ["mlflow"])
    assert result.status == "finished"
    assert server.calls == 5, "asked no more after it failed"
    said = capsys.readouterr().err
    assert said.count("no more is logged to mlflow") == 1
    assert "http://***@mlflow.test/api" in said
    assert "s3cret" not in said
    assert "t0ken" not in said


def test_a_server_that_is_not_there_is_refused_before_training_without_its_password(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", FakeMLflow(num_answers=0))
    with pytest.raises(InlayError) as raised:
        open_trackers(["mlflow"], tmp_path)
    assert "http://***@mlflow.test/`" in raised.value.message
    assert "s3cret" not in raised.value.message
    assert "t0ken" not in raised.value.message


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at postgresql://me:a/b@host/db now", "at postgresql://***@host/db now"),
        ("`https://host/x?token=1` failed", "`https://host/x` failed"),
        ("sqlite:////home/x/mlflow.db", "sqlite:////home/x/mlflow.db"),
    ],
)
def test_urls_are_shown_without_secrets(text, shown):
    assert mask_urls(text) == shown
