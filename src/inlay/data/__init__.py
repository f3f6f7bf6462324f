"""The data room: reads rows, makes tasks of them, splits, tokenises and scores them.

Nothing here imports torch or transformers: tokenizers are passed in as objects, and results are numpy arrays.
"""

from __future__ import annotations

from inlay.data.calibration import (
    bin_confidences,
    calibration_error,
    fit_temperature,
    likeliest_temperature,
    negative_log_likelihood,
    tune_thresholds,
)
from inlay.data.columns import find_fault
from inlay.data.comparison import Comparison, ScoredRows, compare_answers, find_right
from inlay.data.data_files import hide_secrets
from inlay.data.encode import Encoded, describe, epoch_batches
from inlay.data.file_contents import FileQuestion, describe_fault, describe_file
from inlay.data.findings import describe_suspects, describe_unknown, describe_unpredicted
from inlay.data.in_memory import RowsGiven, as_cells, find_texts, join_labels
from inlay.data.kinds import (
    CLASSIFICATION,
    KINDS,
    PASSAGES,
    WHOLE_ROW,
    WRITTEN_TEXT,
    Scheme,
    find_kind,
    find_kind_of_head,
)
from inlay.data.label_errors import LabelErrors, as_probabilities, find_label_errors
from inlay.data.metrics import (
    MEAN,
    METRICS,
    Report,
    decide,
    evaluate_report,
    is_better,
    list_metrics,
    resolve_metric,
    score,
    score_all,
)
from inlay.data.published_sets import GLUE, open_glue
from inlay.data.sampling import TaskSampler, draw_by_label, task_shares
from inlay.data.sources import InputRow, Source, name_of_source, stream_rows, use_whole_paths
from inlay.data.splits import Folds, group_keys, make_folds, row_keys
from inlay.data.squad import tune_threshold
from inlay.data.tags import entity_types
from inlay.data.targets import IGNORED
from inlay.data.tasks import Split, Task, cut_task, load_task, make_task, read_split, take_sample
from inlay.data.token_cache import ArrayCache, encode_cached, open_tokens
from inlay.data.windows import Reading, align_targets, encode_split, find_layout

__all__ = [
    "CLASSIFICATION",
    "GLUE",
    "IGNORED",
    "KINDS",
    "MEAN",
    "METRICS",
    "PASSAGES",
    "WHOLE_ROW",
    "WRITTEN_TEXT",
    "ArrayCache",
    "Comparison",
    "Encoded",
    "FileQuestion",
    "Folds",
    "InputRow",
    "LabelErrors",
    "Reading",
    "Report",
    "RowsGiven",
    "Scheme",
    "ScoredRows",
    "Source",
    "Split",
    "Task",
    "TaskSampler",
    "align_targets",
    "as_cells",
    "as_probabilities",
    "bin_confidences",
    "calibration_error",
    "compare_answers",
    "cut_task",
    "decide",
    "describe",
    "describe_fault",
    "describe_file",
    "describe_suspects",
    "describe_unknown",
    "describe_unpredicted",
    "draw_by_label",
    "encode_cached",
    "encode_split",
    "entity_types",
    "epoch_batches",
    "evaluate_report",
    "find_fault",
    "find_kind",
    "find_kind_of_head",
    "find_label_errors",
    "find_layout",
    "find_right",
    "find_texts",
    "fit_temperature",
    "group_keys",
    "hide_secrets",
    "is_better",
    "join_labels",
    "likeliest_temperature",
    "list_metrics",
    "load_task",
    "make_folds",
    "make_task",
    "name_of_source",
    "negative_log_likelihood",
    "open_glue",
    "open_tokens",
    "read_split",
    "resolve_metric",
    "row_keys",
    "score",
    "score_all",
    "stream_rows",
    "take_sample",
    "task_shares",
    "tune_threshold",
    "tune_thresholds",
    "use_whole_paths",
]
