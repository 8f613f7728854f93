"""Pages of targets: the table of all of them, and a single one."""

from __future__ import annotations

import trakdask as td
from trakdask.explorer.attributions import Attributions
from trakdask.explorer.common import bars, checked, grouped, neighbours, shown
from trakdask.explorer.html import render, value
from trakdask.explorer.view import View
from trakdask.plots.figures import decimals

_MOST_TEXTS = 5
"""How many samples have their words coloured."""


def forms(attributions: Attributions, view: View) -> str:
    """Return the search, the condition and the values by which targets can be filtered."""
    targets = attributions.questions.targets
    view = checked(view, "targets_where", targets.whole)
    is_wrong = "targets_where" in view.errors
    counts, n_wrong = ({}, 0) if is_wrong else (targets.facets(view), targets.wrong_count(view))
    return render("target_forms", attributions, view, facets=counts, n_wrong=n_wrong)


def table(attributions: Attributions, view: View) -> str:
    """Return the table of the targets that a view selects."""
    targets = attributions.questions.targets
    selected, view = targets.selected(view), view.replace(sort=targets.sorted_by(view))
    table = shown(selected, view)
    contents = attributions.target_samples.html(table.index.tolist(), brief=True)
    return render(
        "target_table", attributions, view, table=table, total=len(selected), contents=contents
    )


def confusion(attributions: Attributions, view: View) -> str:
    """Return how often which class is predicted for which label."""
    targets = attributions.questions.targets
    return render("confusion", view, table=targets.confusion(view), label=targets.label)


def grade(attributions: Attributions, view: View) -> str:
    """Return the grade of the scores."""
    return render("grade", grade=attributions.questions.grade())


def graded(attributions: Attributions, view: View) -> str:
    """Compute the grade, last on its page, so that the head of the page has it; nothing else."""
    attributions.questions.grade()
    return ""


def credit(attributions: Attributions, view: View) -> str:
    """Return what each group of training samples did to the loss of these targets, or its share."""
    view = grouped(attributions, view)
    if attributions.questions.targets.selected(view).empty:
        return render("note", text="No target meets the condition.")
    found = attributions.questions.credit(view)
    return bars(attributions, view, found, what="their mean loss" if "sum" in found else "")


def target(attributions: Attributions, view: View) -> str:
    """Return one target, with links to the targets before and after it."""
    targets = attributions.questions.targets
    row = targets.row(view.target, "target")
    (content,) = attributions.target_samples.html([view.target])
    is_wrong = "targets_where" in view.errors
    listed = targets.selected(view.replace(targets_where="") if is_wrong else view).index.to_numpy()
    return render(
        "target", attributions, view, row=row, content=content,
        reading=targets.readings([view.target])[0],
        around=neighbours(listed, view.target, len(targets.whole)),
    )  # fmt: skip


def filters(attributions: Attributions, view: View) -> str:
    """Return the forms that say which training samples are ranked, and how."""
    questions = attributions.questions
    target = questions.targets.one(view.target, "target")
    view = checked(view, "where", questions.first_row.assign(score=0.0), target)
    return render("filters", attributions, view)


def ranked(attributions: Attributions, view: View, *, largest: bool) -> str:
    """Return the training samples that helped or harmed a target most."""
    questions = attributions.questions
    table = questions.top(view, largest=largest)
    positions = table["sample"].tolist()
    return render(
        "ranked", attributions, view, table=table, contents=attributions.samples.html(positions),
        readings=questions.training.readings(positions), digits=decimals(questions.scores(view)),
        kind="helpful" if largest else "harmful",
    )  # fmt: skip


def story(attributions: Attributions, view: View) -> str:
    """Return in words what the samples that helped and harmed a target most have in common."""
    questions, by = attributions.questions, grouped(attributions, view).group_by
    scores, sentences = questions.scores(view), []
    for sign, verb, effect in ((1, "helped", "raised"), (-1, "harmed", "lowered")):
        # 1. Those that did so: the list of a small store may have others at its end.
        table = questions.top(view, largest=sign > 0)
        table = table[sign * table["score"] > 0]
        if table.empty:
            continue
        # 2. Their share in all that did so, and the value that half of them or more have.
        n, share = len(table), 100 * table["score"].sum() / scores[sign * scores > 0].sum()
        common = ""
        if n > 1 and by in table and (counts := table[by].value_counts()).iloc[0] >= n / 2:
            common = f"; {counts.iloc[0]} of them have {by} {value(counts.index[0])}"
        most = f"{n} samples that {verb} most make" if n > 1 else f"sample that {verb} most makes"
        sentences.append(f"The {most} up {share:.0f} % of all that {effect} the output{common}.")
    return render("story", sentences=sentences)


def words(attributions: Attributions, view: View, *, largest: bool) -> str:
    """Return the words of some of these samples, coloured by their scores."""
    questions = attributions.questions
    top = questions.top(view.replace(k=min(view.k, _MOST_TEXTS)), largest=largest)
    if top.empty:
        return render("note", text="No training sample meets the condition.")
    position = top["sample"].to_numpy()
    names = [f"sample {number}" for number in position]
    scores = questions.words(view, position).assign_coords(row=("sample", names))
    return td.plots.text(scores, label="row")._repr_html_()


def groups(attributions: Attributions, view: View) -> str:
    """Return what each group of training samples did to a target: its effect, or its sum."""
    view = grouped(attributions, view)
    if not view.group_by:
        return render("group_form", attributions, view)
    found = attributions.questions.groups(view)
    is_margin = str(attributions.features.attrs.get("loss_kind")).endswith("cross-entropy")
    what = "the right answer's margin" if is_margin else "the output"
    return bars(attributions, view, found, what=what if "sum" in found else "")
