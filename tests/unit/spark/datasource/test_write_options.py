from __future__ import annotations

import pytest

from airflow_delay_provider.domain.arguments import OnConflict, OnPast
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.datasource.options import OnRejects, WriteOptions


def test_without_options_rejects_fail_and_ids_are_kept():
    options = WriteOptions.parse({})
    assert (options.on_conflict, options.on_past, options.on_rejects) == (
        OnConflict.KEEP,
        OnPast.DELIVER,
        OnRejects.FAIL,
    )
    assert (options.batch_size, options.id_prefix, options.rejects) == (5000, "", None)


def test_names_of_options_are_case_insensitive():
    options = WriteOptions.parse({"onconflict": "replace", "BATCHSIZE": "10", "idprefix": ""})
    assert (options.on_conflict, options.batch_size) == (OnConflict.REPLACE, 10)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"chanel": "orders"}, "chanel: df.write has no such option; use one of connection, connectionFile, hold"),
        ({"channel": "two words"}, "channel: 'two words' is not a valid channel name; use"),
        ({"onConflict": "ignore"}, "onConflict: 'ignore' is unknown; use one of keep, fail, replace"),
        ({"onPast": "drop"}, "onPast: 'drop' is unknown; use one of deliver, fail"),
        ({"onRejects": "drop"}, "onRejects: 'drop' is unknown; use one of fail, keep"),
        ({"onRejects": "keep"}, "rejects: onRejects=keep needs a folder for the rejected rows"),
        ({"batchSize": "0"}, "batchSize: '0' is not a whole number of at least 1; use"),
        ({"connection": " "}, "connection: is empty; give it a value, or leave the option out"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, str], sentence: str):
    with pytest.raises(ConfigurationError) as refused:
        WriteOptions.parse(options)
    assert str(refused.value).startswith(sentence)
