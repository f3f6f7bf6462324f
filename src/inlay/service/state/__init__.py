"""The state of the service: tenants, keys, datasets, jobs, tasks and their aliases, in a database and files beside it.

`Workspace` is what one tenant sees, `JobQueue` what a trainer sees, `Tenants` and `Keys` what an operator sees.
Importing this room imports neither torch nor numpy.
"""

from __future__ import annotations

from inlay.service.state.aliases import LIVE, Alias, AliasMove, Publication
from inlay.service.state.backup import BackupReport, back_up, restore
from inlay.service.state.database import Database
from inlay.service.state.datasets import FORMATS, Dataset, DatasetDraft, UploadContent
from inlay.service.state.erasure import (
    ErasureCounts,
    erase_task,
    erase_tenant,
    remove_tenant,
    run_erasure,
    sweep_leftovers,
    sweep_lost_parts,
)
from inlay.service.state.feedback import Correction, Feedback
from inlay.service.state.idempotency import Call, StoredAnswer
from inlay.service.state.job_queue import (
    HEARTBEAT_S,
    LEASE_S,
    Heartbeat,
    JobCohort,
    JobNote,
    JobQueue,
    QueueStats,
)
from inlay.service.state.jobs import (
    BATCH,
    CANCELLED,
    ENDED,
    ERASE,
    FAILED,
    POLICIES,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    TRAIN,
    Job,
    JobEvent,
    JobRequest,
    queued_seconds,
)
from inlay.service.state.keys import SCOPES, USUAL_SCOPES, Key, Keys, Sessions
from inlay.service.state.paging import MOST_ITEMS, Page
from inlay.service.state.served_tasks import ResolvedTask, ServedTask, VersionRow
from inlay.service.state.service_files import ServicePaths, SharedFiles, SharedFolder
from inlay.service.state.state_errors import (
    CallInFlight,
    Conflict,
    Forbidden,
    KeyReused,
    LiveMoved,
    NewerDatabase,
    OverLimit,
    StaleLease,
    Unauthorized,
)
from inlay.service.state.tenants import LOCAL, NO_LIMITS, LimitsUsed, Tenant, TenantLimits, Tenants
from inlay.service.state.usage import DayUsage
from inlay.service.state.values import day_of, to_iso
from inlay.service.state.workspace import Workspace

__all__ = [
    "BATCH",
    "CANCELLED",
    "ENDED",
    "ERASE",
    "FAILED",
    "FORMATS",
    "HEARTBEAT_S",
    "LEASE_S",
    "LIVE",
    "LOCAL",
    "MOST_ITEMS",
    "NO_LIMITS",
    "POLICIES",
    "QUEUED",
    "RUNNING",
    "SCOPES",
    "SUCCEEDED",
    "TRAIN",
    "USUAL_SCOPES",
    "Alias",
    "AliasMove",
    "BackupReport",
    "Call",
    "CallInFlight",
    "Conflict",
    "Correction",
    "Database",
    "Dataset",
    "DatasetDraft",
    "DayUsage",
    "ErasureCounts",
    "Feedback",
    "Forbidden",
    "Heartbeat",
    "Job",
    "JobCohort",
    "JobEvent",
    "JobNote",
    "JobQueue",
    "JobRequest",
    "Key",
    "KeyReused",
    "Keys",
    "LimitsUsed",
    "LiveMoved",
    "NewerDatabase",
    "OverLimit",
    "Page",
    "Publication",
    "QueueStats",
    "ResolvedTask",
    "ServedTask",
    "ServicePaths",
    "Sessions",
    "SharedFiles",
    "SharedFolder",
    "StaleLease",
    "StoredAnswer",
    "Tenant",
    "TenantLimits",
    "Tenants",
    "Unauthorized",
    "UploadContent",
    "VersionRow",
    "Workspace",
    "back_up",
    "day_of",
    "erase_task",
    "erase_tenant",
    "queued_seconds",
    "remove_tenant",
    "restore",
    "run_erasure",
    "sweep_leftovers",
    "sweep_lost_parts",
    "to_iso",
]
