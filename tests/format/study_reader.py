"""A reader of the results of studies that was written from docs/, and imports nothing of Capsule.

It makes the members' locks, their seeds and drawn settings, and the tables again, apart from the
p-values and the human-normalised scores.
"""

import hashlib
import itertools
import json
import math
import statistics
from decimal import Context, Decimal

import rfc8785

RESAMPLES, MARGIN = 2000, (1 - 0.95) / 2
PRECISE, SIGNIFICANT = Context(prec=50), Context(prec=12)


def digest(value):
    return hashlib.sha256(rfc8785.dumps(value)).hexdigest()


# --- members (study.md) ---------------------------------------------------------------------------


def member_lock(study_lock, member):
    pins = study_lock["pins"][member["pins"]]
    spec = study_lock["specs"][member["spec"]]
    return digest({"schema": "capsule/lock/v1", "spec": spec, **pins})


def seed_of(seed, stream, run):
    return int(digest(["capsule/study-seed/v1", seed, stream, run])[:16], 16) >> 11


def drawn(sample, seed, number):
    values = {}
    for field, distribution in sample["fields"].items():
        own = seed if sample["seed"] is None else sample["seed"]
        word = int(digest(["capsule/study-sample/v1", own, field, number])[:16], 16)
        ((kind, given),) = distribution.items()
        if kind == "choice":
            values[field] = given[word * len(given) >> 64]
            continue
        share = PRECISE.divide(Decimal(word), Decimal(2**64))
        low, high = map(Decimal, given)
        ends = (low, high) if kind == "uniform" else (PRECISE.ln(low), PRECISE.ln(high))
        width = PRECISE.subtract(ends[1], ends[0])
        value = PRECISE.add(ends[0], PRECISE.multiply(share, width))
        value = SIGNIFICANT.plus(value if kind == "uniform" else PRECISE.exp(value))
        values[field] = float(min(max(value, low), high))
    return values


def settings_of(group, seed):
    """Return the settings of a group by their part of the members' names, which may be empty."""
    if group["grid"] is not None:
        fields = sorted(group["grid"])
        cells = itertools.product(*(enumerate(group["grid"][field], 1) for field in fields))
        return {
            "-".join(str(number) for number, _ in cell): {
                field: value for field, (_, value) in zip(fields, cell, strict=True)
            }
            for cell in cells
        }
    if group["settings"] is not None:
        return {str(number): values for number, values in enumerate(group["settings"], 1)}
    if group["sample"] is not None:
        numbers = range(1, group["sample"]["count"] + 1)
        return {str(number): drawn(group["sample"], seed, number) for number in numbers}
    return {"": {}}


def planned(study):
    """Return the members by name: group, number of the setting, its values, and all fields."""
    members = {}
    for name, group in study["groups"].items():
        for number, (place, values) in enumerate(settings_of(group, study["seed"]).items(), 1):
            for run in range(1, (group["runs"] or study["runs"]) + 1):
                seeds = {
                    "seeds.root" if stream == "root" else f"seeds.streams.{stream}": seed_of(
                        study["seed"], stream, run
                    )
                    for stream in group["vary"]
                }
                member = ".".join(filter(None, (name, place, str(run))))
                fields = {**study["set"], **group["set"], **values, **seeds}
                members[member] = (name, number, values, fields)
    return members


# --- scores ---------------------------------------------------------------------------------------


def number_of(value):
    return float.fromhex(value) if isinstance(value, str) else float(value)


def program_score(source, claims, files):
    path, _, pointer = source.partition("#")
    value = json.loads(files[f"outputs/{claims['outputs'][path]['sha256']}"])
    for token in pointer.split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        value = value[int(key)] if isinstance(value, list) else value[key]
    numbers = value if isinstance(value, list) else [value]
    return {step: number_of(each) for step, each in enumerate(numbers, 1)}


def task_names(environment):
    main = environment.get("game") or environment["id"]
    return [main, *(environment.get("further_games") or ())]


def curves_of(study_lock, member, claims, files):
    """Return, for each task of a member, the score of each evaluation by its step."""
    study = study_lock["study"]
    if "outputs" in claims:
        return {
            name: program_score(source, claims, files) for name, source in study["scores"].items()
        }
    tasks = task_names(study_lock["specs"][member["spec"]]["environment"])
    return {
        task: {
            point["step"]: statistics.fmean(map(float.fromhex, returns))
            for point in claims["evaluation"]["points"]
            if (returns := point["returns"][place :: len(tasks)])
        }
        for place, task in enumerate(tasks)
    }


# --- tables ---------------------------------------------------------------------------------------


def draws(label, size):
    for counter in itertools.count():
        block = hashlib.sha256(f"{label}/{counter}".encode()).digest()
        for place in range(0, 32, 8):
            yield int.from_bytes(block[place : place + 8], "little") * size >> 64


def quantile(ordered, share):
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def interval(samples, statistic, label):
    """Return an estimate with its interval; a sample is a list of tasks, each with its scores."""
    sources = [
        [draws(f"{label}/{place}/{number}", len(task)) for number, task in enumerate(tasks)]
        for place, tasks in enumerate(samples)
    ]
    found = sorted(
        statistic(
            *(
                [[task[next(source)] for _ in task] for task, source in zip(*pair, strict=True)]
                for pair in zip(samples, sources, strict=True)
            )
        )
        for _ in range(RESAMPLES)
    )
    return {
        "estimate": statistic(*samples),
        "low": quantile(found, MARGIN),
        "high": quantile(found, 1 - MARGIN),
    }


def interquartile_mean(tasks):
    ordered = sorted(score for task in tasks for score in task)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def improvement(first, second):
    def of_task(xs, ys):
        higher = sum(x > y for x in xs for y in ys)
        lower = sum(x < y for x in xs for y in ys)
        return ((higher - lower) / (len(xs) * len(ys)) + 1) / 2

    return statistics.fmean(map(of_task, first, second))


def summary(scores):
    mean = statistics.fmean(scores)
    deviation = statistics.stdev(scores) if len(scores) > 1 else None
    relative = deviation / abs(mean) if deviation is not None and mean else None
    return {
        "mean": mean,
        "standard_deviation": deviation,
        "relative_standard_deviation": relative,
    }


def tables(claims, study_lock, files):
    """Return the tables that this reader makes: groups, curves, improvements and settings."""
    plan, lock = planned(study_lock["study"]), claims["lock"]
    groups = {}
    for identity, member in zip(claims["members"], study_lock["members"], strict=True):
        document = json.loads(files[f"members/{identity['name']}.json"])
        group, number, values, _ = plan[identity["name"]]
        for task, curve in curves_of(study_lock, member, document, files).items():
            last, best = max(curve), max(curve.values())
            row = (
                identity["claim_id"],
                number,
                values,
                curve,
                {"final": curve[last], "best": best},
            )
            groups.setdefault((group, task), []).append(row)
    found = {"groups": [], "curves": [], "improvements": [], "settings": []}
    for (group, task), rows in groups.items():
        about = {"group": group, "task": task}
        for network in ("final", "best"):
            scores = [row[4][network] for row in rows]
            label = f"{lock}/iqm/{group}/{task}/{network}"
            counts = {"runs": len(rows), "claim_ids": len({row[0] for row in rows})}
            mean = {"interquartile_mean": interval([[scores]], interquartile_mean, label)}
            found["groups"].append(
                {**about, "network": network, **counts, **summary(scores), **mean}
            )
        points = []
        for step in sorted(set.intersection(*(set(row[3]) for row in rows))):
            each = summary([row[3][step] for row in rows])
            each.pop("relative_standard_deviation")
            points.append({"step": step, **each})
        found["curves"].append({**about, "points": points})
        numbers = dict.fromkeys(row[1] for row in rows)
        for number in numbers if len(numbers) > 1 else ():
            runs = [row for row in rows if row[1] == number]
            found["settings"].append(
                {
                    **about,
                    "setting": number,
                    "values": runs[0][2],
                    "runs": len(runs),
                    "score": statistics.fmean(row[4]["final"] for row in runs),
                }
            )
    for first, second in itertools.combinations(dict.fromkeys(group for group, _ in groups), 2):
        tasks = [task for group, task in groups if group == first and (second, task) in groups]
        if tasks:
            samples = [
                [[row[4]["final"] for row in groups[name, task]] for task in tasks]
                for name in (first, second)
            ]
            label = f"{lock}/improvement/{first}/{second}"
            found["improvements"].append(
                {
                    "first": first,
                    "second": second,
                    "probability": interval(samples, improvement, label),
                }
            )
    return found
