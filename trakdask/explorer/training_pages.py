"""Pages of training samples: a single one, all of them, and marks."""

from __future__ import annotations

import numpy as np

from trakdask.explorer.attributions import Attributions
from trakdask.explorer.common import checked, marked, neighbours, samples_of, shown
from trakdask.explorer.html import render
from trakdask.explorer.marks import KINDS
from trakdask.explorer.tables import ROWS
from trakdask.explorer.view import LISTS, View
from trakdask.plots.figures import decimals
from trakdask.variables import SAMPLE

_MOST_DUPLICATES = 100


def sample(attributions: Attributions, view: View) -> str:
    """Return one training sample, with links to the samples before and after it in its list."""
    questions = attributions.questions
    row = questions.sample(view)
    (content,) = attributions.samples.html([view.sample])
    n = attributions.features.sizes[SAMPLE]
    listed = samples_of(attributions, view, view.of) if view.of else np.arange(n)
    around = neighbours(listed, view.sample, n)
    first = around["place"] // ROWS * ROWS if view.sample in listed else 0
    page = LISTS.get(view.of, "corpus")
    return render(
        "sample", attributions, view, row=row, content=content, around=around,
        reading=questions.training.readings([view.sample])[0],
        back=view.replace(page=page, first=0 if page == "target" else first),
    )  # fmt: skip


def alike(attributions: Attributions, view: View) -> str:
    """Return the training samples whose features are most like those of one."""
    questions = attributions.questions
    table = questions.alike(view)
    positions = table.index.tolist()
    return render(
        "alike", attributions, view, table=table.join(questions.metadata),
        contents=attributions.samples.html(positions, brief=True),
        readings=questions.training.readings(positions),
    )  # fmt: skip


def targets_of_sample(attributions: Attributions, view: View) -> str:
    """Return the targets that a training sample helped and harmed most."""
    targets = attributions.questions.targets
    table = attributions.questions.targets_of(view)
    positions = table.index.tolist()
    return render(
        "targets_of_sample", attributions, view, table=table, digits=decimals(table["score"]),
        contents=attributions.target_samples.html(positions, brief=True),
        readings=targets.readings(positions), names=[*targets.metadata],
    )  # fmt: skip


def forms(attributions: Attributions, view: View) -> str:
    """Return the condition and the values by which training samples can be filtered."""
    view = checked(view, "where", attributions.questions.first_row)
    counts = {} if "where" in view.errors else attributions.questions.facets(view)
    return render("corpus", attributions, view, facets=counts)


def ranking(attributions: Attributions, view: View) -> str:
    """Return the training samples that a view selects, in its order."""
    questions = attributions.questions
    ranking = questions.ranking(view)
    table = shown(ranking, view)
    positions = table.index.tolist()
    return render(
        "ranking", attributions, view, table=table, total=len(ranking), name=questions.order(view),
        contents=attributions.samples.html(positions, brief=True),
        readings=questions.training.readings(positions),
    )  # fmt: skip


def duplicates(attributions: Attributions, view: View) -> str:
    """Return groups of samples whose features point the same way."""
    table = attributions.questions.duplicates()
    groups = [group.tolist() for _, group in table[:_MOST_DUPLICATES].groupby("group")["sample"]]
    return render("duplicates", attributions, view, table=table, groups=groups)


def mark_lines(attributions: Attributions, view: View) -> str:
    """Return lines of Python that leave out marked samples."""
    if attributions.marks is None:
        return render("no_marks")
    table, marks = marked(attributions), attributions.marks
    lines = {}
    for kind in [kind for kind in KINDS if (table["mark"] == kind).any()]:
        where = f"td.explorer.{marks!r}.where({kind!r})"
        lines[kind] = f"td.drop({marks.store!r}, where={where})"
        if marks.store is None:
            lines[kind] = f"features.isel(sample=~{where}(features))"
    return render("mark_lines", attributions, lines=lines)


def mark_table(attributions: Attributions, view: View) -> str:
    """Return the table of marks."""
    every = marked(attributions)
    table = shown(every, view)
    contents = attributions.samples.html(table["position"].tolist(), brief=True)
    return render("marks", attributions, view, table=table, total=len(every), contents=contents)
