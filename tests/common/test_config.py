"""Settings: sources and their order, checks, one message for everything that is wrong."""

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.config import Config, Rule, Section, Unit, leaves, setting, variables, with_flag_names
from headrace.common.config_flags import add_flags, flag_texts, given_flags
from headrace.common.config_loader import load_config
from headrace.common.errors import ConfigError
from headrace.core_service.config import DEFAULT_CPU_KV_CACHE_MEMORY, CacheConfig, CoreConfig, ModelConfig
from headrace.gateway.config import GatewayConfig, ServerConfig


@dataclass(frozen=True, slots=True)
class Tank(Section):
    volume: int = setting(1024, help="how much", unit=Unit.BYTES, low=1)
    drain: float = setting(30.0, help="how long", unit=Unit.SECONDS, low=0, high=100)
    share: float = setting(0.5, help="part", low=0, high=1, above_low=True)
    label: str | None = setting(None, help="name")
    sealed: bool = setting(True, help="closed")


@dataclass(frozen=True, slots=True)
class Mill(Config):
    side: ClassVar[str] = "core"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("wheels", "tank.volume"), lambda wheels, volume: "too dry" if len(wheels) > volume else None),
    )
    wheels: tuple[str, ...] = setting(name="wheel", help="names")
    stone: str = setting("hard", help="kind", choices=("hard", "soft"))
    tank: Tank = field(default_factory=Tank)


def load(flags=None, environment=None, file=None) -> Mill:
    return load_config(Mill, {"wheel": "a", **(flags or {})}, environment or {}, config_file=file)


def problems_of(**arguments) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(**arguments)
    return caught.value.problems


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "mill.yaml").write_text(text)
        return str(tmp_path / "mill.yaml")

    return write


def test_the_order_is_flag_environment_file_default(yaml_file):
    file = yaml_file("core: {stone: soft, tank: {volume: 3}}")
    assert load().tank.volume == 1024
    assert load(file=file).tank.volume == 3
    assert load(file=file).stone == "soft"
    assert load(environment={"HEADRACE_VOLUME": "2"}, file=file).tank.volume == 2
    assert load({"volume": "1"}, {"HEADRACE_VOLUME": "2"}, file).tank.volume == 1


def test_the_file_may_be_named_by_the_environment(yaml_file):
    assert load(environment={"HEADRACE_CONFIG": yaml_file("core: {stone: soft}")}).stone == "soft"


@pytest.mark.parametrize(
    ("text", "size"), [("1GiB", 1 << 30), ("512MiB", 512 << 20), ("1.5KiB", 1536), ("2GB", 2_000_000_000), ("7", 7)]
)
def test_sizes_have_units(text, size):
    assert load({"volume": text}).tank.volume == size


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("500ms", 0.5), ("1.5m", 90), ("12", 12)])
def test_durations_have_units(text, seconds):
    assert load({"drain": text}).tank.drain == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("volume", "1G"),
        ("volume", "-1"),
        ("volume", "0"),
        ("volume", "lots"),
        ("drain", "1 fortnight"),
        ("drain", "101"),
        ("drain", "-1s"),
        ("share", "0"),
        ("share", "1.01"),
        ("share", "nan"),
        ("share", "half"),
        ("stone", "wet"),
        ("sealed", "maybe"),
        ("wheel", "a,,b"),
    ],
)
def test_a_wrong_value_is_named_with_its_source_and_what_was_given(name, text):
    leaf = next(leaf for leaf in leaves(Mill) if leaf.name == name)
    assert problems_of(flags={name: text})[0].startswith(f"{leaf.flag}: must be ")
    if name != "wheel":  # there the flag of load() wins
        assert problems_of(environment={leaf.variable: text})[0].startswith(f"{leaf.variable}: must be ")
    assert text.split(",")[0] in problems_of(flags={name: text})[0]


def test_every_wrong_value_is_in_one_message(yaml_file):
    found = problems_of(
        flags={"volume": "0"},
        environment={"HEADRACE_STONE": "wet", "HEADRACE_STONES": "hard", "HEADRACE_SHARE": "2", "PATH": "/bin"},
        file=yaml_file("core: {tank: {drain: x, colour: red}, wheels: 3}\nmill: {}"),
    )
    text = "; ".join(found)
    for part in ("--volume", "HEADRACE_STONE:", "HEADRACE_STONES", "HEADRACE_SHARE", "core.tank.drain"):
        assert part in text
    assert "core.tank.colour: unknown key" in text
    assert "unknown key mill" in text
    assert len(found) == 7


def test_a_near_miss_is_suggested(yaml_file):
    assert "did you mean HEADRACE_VOLUME?" in problems_of(environment={"HEADRACE_VOLUM": "1"})[0]
    assert "did you mean core.tank.volume?" in problems_of(file=yaml_file("core: {tank: {volum: 1}}"))[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("core: {volume: 5}", "core.volume: unknown key (it belongs at core.tank.volume)"),
        ("stone: soft", "unknown key stone (it belongs at core.stone)"),
        ("cor: {}", "unknown key cor (did you mean core?)"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_the_right_one(yaml_file, text, said):
    (problem,) = problems_of(file=yaml_file(text))
    assert problem.endswith(f"mill.yaml: {said}")


def test_a_value_in_place_of_a_section_is_told_the_key_of_that_name(yaml_file):
    with pytest.raises(ConfigError, match=r"core\.model: .*did you mean core\.model\.model\?"):
        load_config(CoreConfig, {}, {}, config_file=yaml_file("core: {model: demo}"))


def test_numbers_in_messages_have_all_their_digits():
    with pytest.raises(ConfigError, match=r"at most 65535; got 99999999$"):
        load_config(CoreConfig, {"model": "demo", "port": "99999999"}, {})
    assert problems_of(flags={"share": "1.0000001"}) == ["--share: must be above 0 and at most 1; got 1.0000001"]


def test_problems_found_while_starting_are_named_by_their_flags():
    problems = ["max_model_len: too long", "tokenizer: odd", "no name"]
    assert with_flag_names(CoreConfig, problems) == ["--max-model-len: too long", "tokenizer: odd", "no name"]


def test_variables_of_the_other_side_and_of_other_uses_are_no_mistakes():
    environment = {"HEADRACE_CACHE": "/x", "HEADRACE_DEMO_MODEL": "/y", "HEADRACE_CORE": "a:1"}
    config = load_config(Mill, {"wheel": "a"}, environment, foreign_variables=variables(GatewayConfig))
    assert config.wheels == ("a",)


def test_variables_that_kubernetes_sets_for_services_are_no_mistakes():
    links = {
        "HEADRACE_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "HEADRACE_GATEWAY_SERVICE_PORT_GRPC": "50051",
        "HEADRACE_GATEWAY_PORT": "tcp://10.0.0.1:50051",
        "HEADRACE_GATEWAY_PORT_50051_TCP_ADDR": "10.0.0.1",
    }
    assert load(environment=links).wheels == ("a",)
    assert "enableServiceLinks" in problems_of(environment={"HEADRACE_VOLUME": "tcp://10.0.0.1:1"})[0]


def test_a_variable_set_to_nothing_counts_as_unset():
    assert load(environment={"HEADRACE_VOLUME": "", "HEADRACE_LABEL": ""}).tank == Tank()


def test_a_required_setting_is_asked_for():
    with pytest.raises(ConfigError, match="--wheel is required"):
        load_config(Mill, {}, {})


def test_rules_over_good_settings_are_reported_together_with_wrong_values():
    assert problems_of(flags={"wheel": "a,b", "volume": "1", "stone": "wet"}) == [
        "--stone: must be one of hard, soft; got 'wet'",
        "too dry",
    ]
    assert problems_of(flags={"wheel": "a,b", "volume": "0"}) == ["--volume: must be at least 1; got 0"]


@pytest.mark.parametrize(
    "text",
    [
        "core: [1]",
        "core: {tank: 3}",
        "just text",
        "core: {wheels: [1]}",
        "core: {stone: 1}",
        "core: {tank: {sealed: 1.5}}",
    ],
)
def test_a_file_of_the_wrong_form_is_a_problem_and_no_traceback(yaml_file, text):
    file = yaml_file(text)
    with pytest.raises(ConfigError):
        load_config(Mill, {}, {}, config_file=file)


def test_a_file_that_cannot_be_read_is_one_line(yaml_file, tmp_path):
    assert "\n" not in problems_of(file=yaml_file("core: [\n"))[0]
    assert "cannot be read" in problems_of(file=str(tmp_path / "none.yaml"))[0]


def test_yaml_types_are_taken_as_they_are(yaml_file):
    file = yaml_file("core: {wheels: [a, b], tank: {sealed: false, volume: 2KiB, drain: 5, share: 1}}")
    config = load_config(Mill, {}, {}, config_file=file)
    assert config.wheels == ("a", "b")
    assert config.tank == Tank(volume=2048, drain=5.0, share=1.0, sealed=False)


def test_the_other_sides_part_of_the_file_is_not_read(yaml_file):
    assert load(file=yaml_file("gateway: {anything: 1}")) == load()


def test_trees_are_frozen_and_checked_when_built_in_code():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().tank.volume = 2  # type: ignore[misc]
    with pytest.raises(ConfigError, match="volume: must be at least 1"):
        Tank(volume=0)
    with pytest.raises(ConfigError, match="too dry"):
        Mill(wheels=("a", "b"), tank=Tank(volume=1))
    with pytest.raises(ConfigError, match="stone"):
        Mill(wheels=("a",), stone="wet")


@given(
    volume=st.integers(1, 1 << 40),
    share=st.floats(0, 1, exclude_min=True),
    sealed=st.booleans(),
    wheels=st.lists(st.text("abc", min_size=1), min_size=1, unique=True, max_size=1),
)
def test_flags_written_for_a_child_process_mean_the_same(volume, share, sealed, wheels):
    words = [f"--volume={volume}", f"--share={share!r}", "--sealed" if sealed else "--no-sealed"]
    words.append("--wheel=" + ",".join(wheels))
    parser = argparse.ArgumentParser()
    add_flags(parser, Mill)
    flags = given_flags(parser.parse_args(words), Mill)
    again = given_flags(parser.parse_args(list(flag_texts(flags, Mill))), Mill)
    assert again == flags
    config = load_config(Mill, again, {})
    assert (config.tank.volume, config.tank.share, config.tank.sealed) == (volume, share, sealed)


@pytest.mark.parametrize("tree", [CoreConfig, GatewayConfig])
def test_names_are_unique_in_a_tree_and_every_setting_has_help(tree):
    names = [leaf.name for leaf in leaves(tree)]
    assert len(set(names)) == len(names)
    assert all(leaf.setting.help for leaf in leaves(tree))


def test_the_two_sides_have_these_defaults():
    core = load_config(CoreConfig, {"model": "demo"}, {})
    assert (core.server.host, core.server.port, core.server.drain_grace) == ("127.0.0.1", 50052, 30.0)
    assert (core.scheduler.max_num_seqs, core.scheduler.max_num_batched_tokens) == (256, 2048)
    assert (core.cache.block_size, core.cache.enable_prefix_caching) == (16, True)
    assert (core.cache.kv_cache_memory, core.cache.gpu_memory_utilization) == (None, 0.9)
    assert (core.model.dtype, core.model.max_logprobs) == ("auto", 20)
    gateway = load_config(GatewayConfig, {"core": "127.0.0.1:50052"}, {})
    assert (gateway.server.host, gateway.server.port) == ("127.0.0.1", 50051)
    assert gateway.limits.max_message_bytes == 16 << 20


def test_a_cpu_has_a_default_cache_size():
    assert CacheConfig().cpu_kv_cache_memory == DEFAULT_CPU_KV_CACHE_MEMORY
    assert CacheConfig(kv_cache_memory=5).cpu_kv_cache_memory == 5


def test_combinations_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="revision"):
        CoreConfig(ModelConfig("demo", revision="main"))
    assert CoreConfig(ModelConfig("org/name", revision="main")).model.revision == "main"
    for host, core in (("127.0.0.1", "localhost:7"), ("0.0.0.0", "127.0.0.1:7"), ("10.1.1.1", "10.1.1.1:7")):
        with pytest.raises(ConfigError, match="own address"):
            GatewayConfig((core,), server=ServerConfig(host=host, port=7))
    assert GatewayConfig(("core:7",), server=ServerConfig(host="0.0.0.0", port=7)).cores == ("core:7",)


@pytest.mark.parametrize("cores", ["a", "a:0", "a:65536", "a:x", ":1", "::1:5", "a:1,a:1", "a:1,b"])
def test_core_addresses_are_checked(cores):
    with pytest.raises(ConfigError, match="--core"):
        load_config(GatewayConfig, {"core": cores}, {})


def test_several_cores_are_listed_with_commas():
    assert load_config(GatewayConfig, {"core": "a:1, [::1]:2"}, {}).cores == ("a:1", "[::1]:2")
