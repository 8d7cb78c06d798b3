"""One switch says which kernels run; what is forced must work, and automatic choice proves itself first."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mference_kernels import attention, cpu, experts, levels, native, quant
from mference_kernels.activations import geglu_ops


@pytest.fixture(autouse=True)
def chosen_anew(restored: None) -> Iterator[None]:
    del restored
    levels.level.cache_clear()
    yield
    levels.level.cache_clear()


def proven() -> list[str]:
    return [variant for variant in native.variants() if variant not in levels.UNPROVEN]


def matrix(stack: tuple[int, ...] = ()) -> quant.Quantized:
    codes, scales, biases = mx.quantize(mx.random.normal((*stack, 128, 128), key=mx.random.key(2)), bits=4)
    return quant.Quantized(codes=codes, scales=scales, biases=biases, bits=4, group_size=64)


def test_automatic_choice_takes_the_best_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(levels.SWITCH, raising=False)
    assert levels.level() == levels.Level(variant=proven()[0])
    assert levels.cpu() is cpu


def test_off_means_the_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(levels.SWITCH, "off")
    assert levels.cpu() is None
    assert "off" in levels.level().reason
    x, w = mx.random.normal((3, 128)), matrix()
    assert mx.array_equal(quant.linear(x, w), quant.linear_ops(x, w))


@pytest.mark.parametrize("variant", levels.VARIANTS)
def test_each_level_can_be_forced(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(levels.SWITCH, variant)
    if variant in native.variants():
        assert levels.level() == levels.Level(variant=variant)
    else:
        with pytest.raises(native.Unavailable, match=f"this machine has no '{variant}'"):
            levels.level()


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(levels.SWITCH, "fastest")
    with pytest.raises(ValueError, match="must be off, auto or one of"):
        levels.level()


@pytest.mark.parametrize("count", ["0", "two", "-1"])
def test_a_thread_count_that_cannot_be_meant_is_refused(count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(levels.THREADS, count)
    with pytest.raises(ValueError, match="must be a positive number"):
        levels.level()


def test_a_variant_that_fails_its_check_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    best, *others = proven()
    check = levels.self_check
    monkeypatch.setattr(levels, "self_check", lambda name: "wrong bits" if name == best else check(name))
    monkeypatch.delenv(levels.SWITCH, raising=False)
    assert levels.level().variant == (others[0] if others else None)
    levels.level.cache_clear()
    monkeypatch.setenv(levels.SWITCH, best)
    with pytest.raises(native.Unavailable, match="wrong bits"):
        levels.level()


def test_the_check_sees_a_wrong_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = cpu.linear_cpu
    monkeypatch.setattr(cpu, "linear_cpu", lambda x, w: mx.where(x[:1, :1] > 9, 0, exact(x, w) * (1 + 2**-22)))
    problem = levels.self_check("portable")
    assert problem is not None
    assert "wrong bits" in problem


def test_without_a_library_the_definitions_run_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise native.Unavailable("the native library was not built")

    monkeypatch.setattr(native, "library", missing)
    monkeypatch.delenv(levels.SWITCH, raising=False)
    assert levels.cpu() is None
    assert "not built" in levels.level().reason
    assert "times slower" in levels.level().reason


def test_choosers_use_the_fast_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(levels.SWITCH, raising=False)
    x, w = mx.random.normal((3, 128)), matrix()
    assert mx.array_equal(quant.linear(x, w), cpu.linear_cpu(x, w))
    assert mx.array_equal(quant.linears(x, [w, w])[1], cpu.linear_cpu(x, w))
    ids = mx.array([5, 0])
    assert mx.array_equal(quant.rows(ids, w), cpu.rows_cpu(ids, w))
    held = experts.ExpertWeights(gate=matrix((2,)), up=matrix((2,)), down=matrix((2,)), dtype=mx.float32)
    slots = mx.array([[1, 0], [0, 0], [1, 1]])
    want = cpu.gated_experts_cpu(x, slots, held, geglu_ops)
    assert mx.array_equal(experts.gated_experts(x, slots, held, geglu_ops), want)
    q = mx.random.normal((2, 3, 32))
    got = attention.attention(q, q, q, scale=1.0, query_start=0, key_start=0)
    assert mx.array_equal(got, cpu.attention_cpu(q, q, q, scale=1.0, query_start=0, key_start=0))


def test_what_the_library_lacks_goes_to_the_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(levels.SWITCH, raising=False)
    codes, scales, biases = mx.quantize(mx.random.normal((64, 128)), bits=6)
    six = quant.Quantized(codes=codes, scales=scales, biases=biases, bits=6, group_size=64)
    x = mx.random.normal((3, 128))
    assert mx.array_equal(quant.linear(x, six), quant.linear_ops(x, six))
    dense = quant.Dense(weight=mx.random.normal((64, 128)))
    assert mx.array_equal(quant.linears(x, [dense, six])[0], quant.linear_ops(x, dense))
