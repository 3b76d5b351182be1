"""Functions are short and take few arguments. What takes more says why, and may only shrink."""

import ast
import functools
import pathlib
import re

import pytest

import dpcompanion

ROOT = pathlib.Path(dpcompanion.__file__).parent
LINES, PARAMETERS = 60, 8

# {module and function: the number of its parameters}
EXCEPTIONS = {
    "audit.trained.audit_training": 11,
    "engine.assembly.assemble": 14,
    "engine.attention.MultiheadAttention.__init__": 11,
    "engine.private.IndividualizedPrivacyEngine.make_private_with_budgets": 16,
    "engine.private.IndividualizedPrivacyEngine.make_private_with_filter": 13,
    "engine.recurrence._Recurrent.__init__": 10,
    "filters.calibration._delta": 9,
    "filters.calibration._largest_budget": 9,
    "filters.calibration.calibrate_filter": 10,
    "filters.exact.ExactFilter.__init__": 13,
    "filters.game.adaptive_delta": 9,
    "filters.game.worst_case": 9,
    "gradients.batch_dependence.batch_dependence_error": 9,
    "gradients.clipping._in_microbatches": 9,
    "gradients.clipping.clipped_sum": 9,
    "mechanism.plan.DPSGDPlan.for_epsilon": 14,
    "mechanism.plan.DPSGDPlan.for_epsilons": 15,
    "output_perturbation.grids.train_grid": 13,
    "per_instance.batches.holder_epsilon": 9,
    "per_instance.updates.update_divergence": 9,
    "release.private_quantiles": 12,
    "reproduction.comparison.compare": 10,
    "reproduction.papers.gradients_look_alike.compositions.side_by_side": 10,
    "reproduction.papers.idp_sgd.beyond_the_paper.audit": 10,
    "reproduction.papers.intrinsic_privacy.grids.grid_runs": 9,
    "reproduction.records.make": 12,
    "training.ensembles.train_ensemble": 19,
    "training.loop.TrainingLoop.__init__": 12,
    "training.loop.train": 21,
    "training.runs.Ensemble.__init__": 11,
}
#: The docstring of each says why, in a sentence that begins with these words.
REASON = "Many arguments, since "


def functions(tree, name):
    """(dotted name, node) of all functions below a node, those in classes and in functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if not isinstance(node, ast.ClassDef):
                yield f"{name}.{node.name}", node
            yield from functions(node, f"{name}.{node.name}")
        else:
            yield from functions(node, name)


def size(node, text):
    """The lines of code below a function's docstring, without comments and empty lines; and its
    parameters but `self`.
    """
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    lines = text[body[0].lineno - 1 : node.end_lineno] if body else []
    given = node.args
    named = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return (
        sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines),
        len(named) - (named[:1] in (["self"], ["cls"])) + bool(given.vararg) + bool(given.kwarg),
    )


def modules():
    """(module, its text) of the package."""
    for file in sorted(ROOT.rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield module, file.read_text(encoding="utf-8")


@functools.cache
def found():
    """{function: (lines, parameters, docstring)}; the largest of what has the same name, and the
    last docstring.
    """
    found = {}
    for module, text in modules():
        for name, node in functions(ast.parse(text), module):
            lines, parameters = size(node, text.splitlines())
            before = found.get(name, (0, 0))
            docstring = ast.get_docstring(node) or ""
            found[name] = max(before[0], lines), max(before[1], parameters), docstring
    return found


def test_a_function_is_measured_without_docstring_comments_and_self():
    text = """
def f(self, a, *b, c=1, **d):
    '''Says so.'''
    # why
    x = (
        1
    )

    return x
"""
    assert size(ast.parse(text).body[0], text.splitlines()) == (4, 4)


def test_functions_are_short_and_take_few_arguments():
    large = {
        name: (lines, parameters)
        for name, (lines, parameters, _) in found().items()
        if lines > LINES or parameters > EXCEPTIONS.get(name, PARAMETERS)
    }
    assert not large, f"above {LINES} lines of code or {PARAMETERS} parameters"


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_says_why_and_only_shrinks(name):
    """A function that has become smaller takes its exception along."""
    _, parameters, docstring = found()[name]
    assert PARAMETERS < EXCEPTIONS[name] <= parameters
    assert re.search(rf"^{REASON}\S[^\n]+\.$", docstring, re.MULTILINE)


def test_nothing_else_gives_such_a_reason():
    assert {name for name, (*_, docstring) in found().items() if REASON in docstring} == {
        *EXCEPTIONS
    }
