"""What a core tells of its model."""

import json

import pytest
import structlog

from headrace.common.params import ModelLimits
from headrace.core_service.loading import default_sampling

LIMITS = ModelLimits(vocab_size=100, max_model_len=50, max_logprobs=5)


def defaults_of(**config):
    return default_sampling(json.dumps(config).encode(), LIMITS)


def test_defaults_come_from_the_generation_config():
    found = defaults_of(temperature=0.6, top_p=0.9, top_k=40, do_sample=True, eos_token_id=2)
    assert (round(found.temperature, 3), round(found.top_p, 3), found.top_k) == (0.6, 0.9, 40)
    assert not found.HasField("min_p")


def test_a_models_own_repetition_penalty_is_a_default():
    assert round(defaults_of(repetition_penalty=1.1).repetition_penalty, 3) == 1.1


@pytest.mark.parametrize(
    "bad",
    [{"temperature": 5}, {"top_p": 0}, {"top_k": -7}, {"min_p": "much"}, {"top_k": 2**40}, {"repetition_penalty": 0}],
)
def test_what_breaks_the_rules_is_left_out_with_a_warning(bad):
    with structlog.testing.capture_logs() as lines:
        found = defaults_of(**bad)
    assert not found.ListFields()
    assert [line["name"] for line in lines] == list(bad)
