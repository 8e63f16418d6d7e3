"""The process that fetches one split by the library `datasets`: python -m … REQUEST_JSON FOLDER."""

from __future__ import annotations

import json
import sys
from typing import Any

from services.common.processes import die_with_parent


def main(request: dict[str, Any], folder: str) -> str:
    """Saves the split into the folder; answers what is wrong with the request, or nothing."""
    import datasets

    found = datasets.load_dataset(
        request["name"], request["subset"], split=request["split"], revision=request["revision"]
    )
    if isinstance(found, datasets.DatasetDict):
        if len(found) != 1:
            return f"expected split to be one of {', '.join(found)}; write {request['name']}:{next(iter(found))}"
        (found,) = found.values()
    found.save_to_disk(folder)
    return ""


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    die_with_parent(given["parent"])
    sys.exit(main(given, sys.argv[2]) or None)
