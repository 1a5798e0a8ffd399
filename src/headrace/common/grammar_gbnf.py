"""GBNF, the grammar syntax of llama.cpp, rewritten as Lark by llguidance's own converter, within limits."""

from llguidance.gbnf_to_lark import gbnf_to_lark

from headrace.common.grammar_schema import ConstraintError

# The converter's time grows with the square of their number.
MAX_GBNF_RULES = 500


def lark_from_gbnf(text: str) -> str:
    """Lark whose start rule is the GBNF's root. Raises ConstraintError."""
    if (rules := text.count("::=")) > MAX_GBNF_RULES:
        raise ConstraintError(f"must have at most {MAX_GBNF_RULES} rules; got {rules}")
    try:
        return str(gbnf_to_lark(text))
    except RecursionError:
        raise ConstraintError("is nested too deeply") from None
    except Exception as error:  # the rewriting raises bare Exception
        raise ConstraintError(f"is not valid GBNF: {error}") from None
