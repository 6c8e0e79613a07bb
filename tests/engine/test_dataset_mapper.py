"""Errors of reading data name the image."""

import pytest
import torch

from gw_detectron.engine.dataset_mapper import ImageNamingMapper, RecordError


def wrong_size(record):
    raise ValueError("height 3 instead of 4")


def test_an_error_in_a_worker_process_has_the_message_alone():
    def read(records):
        return [ImageNamingMapper(wrong_size)(record) for record in records]

    loader = torch.utils.data.DataLoader([{"file_name": "a.jpg"}], num_workers=1, collate_fn=read)
    with pytest.raises(RecordError) as raised:
        next(iter(loader))
    assert str(raised.value).startswith("'a.jpg': cannot be used: height 3 instead of 4")


def test_errors_of_a_custom_mapper_name_the_file_and_keep_their_class():
    def bug(record):
        return record["annotations"]

    with pytest.raises(RecordError, match="^'a.jpg': cannot be used: height 3 instead of 4"):
        ImageNamingMapper(wrong_size)({"file_name": "a.jpg"})
    with pytest.raises(KeyError) as raised:
        ImageNamingMapper(bug)({"file_name": "a.jpg"})
    assert raised.value.__notes__ == ["while reading a.jpg"]
