"""Random requests to all routes, made from the OpenAPI document, by two tenants.

None is answered by a fault of the service, or by anything that the document does not allow; and what is asked for with
one tenant's ids and the other's key shows nothing. `INLAY_CASES=20000` asks for so many in all.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from two_tenants import MARK, TwoTenants, make_two_tenants
from web_bench import open_bench

CASES = int(os.environ.get("INLAY_CASES", "0"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    allow_header_conformance,
    unsupported_method,
]
BASE = "http://127.0.0.1"
QUIET = settings(
    deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=False
)
# The key that asks must not be ended, nor what the other requests are about.
KEPT = {"revoke_key", "rotate_key", "erase_task", "delete_dataset"}
OPERATIONS = 42
SENT = Counter[str]()
"""requests of the cases, by whether one's own key or the other tenant's sent them"""


@pytest.fixture(scope="module")
def two(migrated, tmp_path_factory):
    bench = open_bench(shutil.copytree(migrated, tmp_path_factory.mktemp("cases") / "home"))
    with bench.client:
        found = make_two_tenants(bench)
        found.owner.post(f"/v1/jobs/{found.ids['job']}/cancel")  # so that the stream of its events ends
        yield found
    bench.db.close()
    if CASES:
        print(f"\n{sum(SENT.values())} requests: {dict(SENT)}")


@pytest.fixture(scope="module")
def operations(two: TwoTenants):
    document = two.owner.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    schema.app = two.bench.app
    found = [result.ok() for result in schema.get_all_operations()]
    assert len(found) == OPERATIONS
    return found


def checks_of(answer):
    """All checks; that a body was too long says nothing of what else was wrong with it."""
    return [check for check in CHECKS if answer.status_code != 413 or check is not negative_data_rejection]


def takes_anything(operation):
    raw = operation.definition.raw
    return "requestBody" in raw or any(item["in"] != "path" for item in raw.get("parameters", ()))


@pytest.mark.parametrize("number", range(OPERATIONS))
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_breaks_the_service_or_shows_what_is_anothers(two, operations, number, mode):
    operation = operations[number]
    if mode == GenerationMode.NEGATIVE and not takes_anything(operation):
        return
    name = operation.definition.raw["operationId"]
    pick = random.Random(f"{name} {mode}")
    most = max(2, CASES // (2 * 2 * OPERATIONS))

    @seed(1)
    @settings(QUIET, max_examples=most)
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case):
        SENT["own"] += 1
        own = case.call(base_url=BASE, headers={"authorization": f"Bearer {two.bench.secrets['acme']}"})
        case.validate_response(own, checks=checks_of(own))
        if name not in KEPT and mode == GenerationMode.POSITIVE:  # now about things that are there
            case.path_parameters = {
                key: two.ids.get(key, value) if pick.random() < 0.8 else value
                for key, value in (case.path_parameters or {}).items()
            }
            SENT["about what is there"] += 1
            real = case.call(base_url=BASE, headers={"authorization": f"Bearer {two.bench.secrets['acme']}"})
            case.validate_response(real, checks=checks_of(real))
        SENT["foreign"] += 1
        foreign = case.call(base_url=BASE, headers={"authorization": f"Bearer {two.bench.secrets['globex']}"})
        assert foreign.status_code < 500 or foreign.status_code == 503
        text = foreign.text.replace(two.ids["task"], "")
        assert MARK not in text
        assert not [item for item in two.hidden - set(two.ids.values()) if item in text]

    run()
