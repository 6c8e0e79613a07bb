"""Complete COCO files as small labeling tools write them."""

from typing import Any

#: field -> the words that say what is taken where it is missing
_IMPLIED = {"area": "width times height of bbox", "iscrowd": "0"}


def complete_coco(content: Any) -> tuple[Any, str]:
    """Add the fields of annotations that evaluation reads and the others imply.

    - ``area``: width times height of ``bbox``. It decides whether an object counts as small, medium or large.
    - ``iscrowd``: 0.
    - ``id``: from 1 in the order of the file, if no annotation has one, or if one is 0: pycocotools counts the match of
      an object with id 0 as a miss.

    Args:
        content: of a COCO file.

    Returns:
        The content, or a completed copy, and a description of what was added, "" for nothing. A malformed content is
        returned as it is: the checks before a run name its fault.
    """
    try:
        annotations = content["annotations"]
        lacking = {key: sum(key not in each for each in annotations) for key in _IMPLIED}
        renumbered = bool(annotations) and (
            all("id" not in each for each in annotations) or any(each.get("id", 1) == 0 for each in annotations)
        )
        if not (renumbered or any(lacking.values())):
            return content, ""
        completed = []
        for number, each in enumerate(annotations, start=1):
            width, height = each["bbox"][2:]
            numbered = each | {"id": number} if renumbered else each
            completed.append({"area": float(width * height), "iscrowd": 0, **numbered})
    except (AttributeError, LookupError, TypeError, ValueError):
        return content, ""
    added = [
        f"{count} of {len(annotations)} annotations have no {key} ({_IMPLIED[key]} is taken)"
        for key, count in lacking.items()
        if count
    ]
    if renumbered:
        added.append("its annotations are not numbered from 1 (they are renumbered)")
    return {**content, "annotations": completed}, ", ".join(added)
