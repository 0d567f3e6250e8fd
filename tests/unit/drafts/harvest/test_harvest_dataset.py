"""
A data set reads only permitted, unerased and unaltered samples.
"""

import stat
from dataclasses import replace

import pytest

from appliance.drafts.harvest.dataset import DATASETS, find_manifest, open_dataset, save_manifest
from appliance.drafts.harvest.dataset_manifest import DatasetManifest, ManifestEntry, is_held_out
from appliance.errors import DraftNotFoundError, DraftRefusedError, DraftStorageError
from appliance.tenancy import ContentPolicy
from tests.unit.drafts.harvest.harvest_site import TOKENIZER, WEIGHTS, allowing, sample_of


def entry_of(sample):
    return ManifestEntry(
        request_id=sample.request_id,
        tenant=sample.tenant,
        template=sample.template,
        context=sample.context,
        tokens=len(sample.token_ids),
        digest=sample.digest,
        held_out=is_held_out(sample.request_id),
    )


def manifest_of(*samples, made="2027-01-15T08:00:00.000Z"):
    entries = sorted((entry_of(sample) for sample in samples), key=lambda entry: entry.request_id)
    return DatasetManifest(target=WEIGHTS, tokenizer=TOKENIZER, policy="p", made=made, samples=tuple(entries))


@pytest.fixture
def taken(site):
    """Thirty samples of two tenants that allow it."""
    site.tenants(allowing("acme"), allowing("clinic"))
    samples = []
    for number in range(30):
        tenant = "acme" if number % 2 else "clinic"
        samples.append(site.vault.keep(sample_of(site.keep(tenant), tenant, token_ids=(1, number, 3, 4))))
    return samples


def opened(site, samples):
    manifest = manifest_of(*samples)
    save_manifest(site.directory / "drafts", manifest)
    return open_dataset(site.settings, manifest.digest)


def read(dataset):
    return [*dataset.read(False), *dataset.read(True)]


def test_dataset_reads_training_and_held_out_samples(site, taken):
    dataset = opened(site, taken)
    train, held = list(dataset.read(False)), list(dataset.read(True))
    assert sorted(each.request_id for each in (*train, *held)) == [each.request_id for each in taken]
    assert {each.request_id for each in held} == {
        each.request_id for each in taken if is_held_out(each.request_id)
    }
    assert {*train, *held} == set(taken)
    assert (dataset.missing, dataset.withheld) == (0, 0)


def test_erased_samples_are_skipped_and_counted_once(site, taken):
    dataset = opened(site, taken)
    site.erase("acme", taken[1].request_id, taken[3].request_id)
    for _ in range(2):
        assert {each.request_id for each in read(dataset)} == {
            each.request_id for number, each in enumerate(taken) if number not in {1, 3}
        }
    assert dataset.missing == 2
    site.erase("clinic")
    assert {each.tenant for each in read(dataset)} == {"acme"}
    assert dataset.missing == 17


def test_samples_of_a_tenant_without_permission_are_withheld(site, taken):
    dataset = opened(site, taken)
    site.tenants(replace(allowing("acme"), content=ContentPolicy.NONE), allowing("clinic", may=frozenset()))
    assert {each.tenant for each in read(dataset)} == {"acme"}
    assert (dataset.missing, dataset.withheld) == (0, 15)
    site.tenants()
    assert read(dataset) == []
    assert dataset.withheld == 30


def test_replaced_sample_stops_the_reading(site, taken):
    dataset = opened(site, taken)
    site.vault.keep(replace(taken[0], salt="", token_ids=(9, 9, 9, 9)))
    with pytest.raises(DraftRefusedError, match="manifest"):
        read(dataset)


def test_sample_of_another_tokenizer_is_refused(site, taken):
    dataset = opened(site, taken)
    site.vault.keep(replace(taken[0], salt="", tokenizer="sha256:other"))
    with pytest.raises(DraftRefusedError, match="another tokenizer"):
        read(dataset)


def test_data_set_is_found_by_digest_or_prefix(site, taken):
    drafts = site.directory / "drafts"
    first, second = (manifest_of(*taken, made=made) for made in ("a", "b"))
    for manifest in (first, second):
        save_manifest(drafts, manifest)
    digits = first.digest.removeprefix("sha256:")
    other = second.digest.removeprefix("sha256:")
    differ = next(place for place in range(64) if digits[place] != other[place])
    for name in (first.digest, digits, digits[: differ + 1], first.digest.upper()):
        assert find_manifest(drafts, name) == first
    for name in (digits[:differ], "", "sha256:", "zz", "../x"):
        with pytest.raises(DraftNotFoundError):
            find_manifest(drafts, name)


def test_manifest_file_is_private_and_holds_no_content(site, taken):
    path = save_manifest(site.directory / "drafts", manifest_of(*taken))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert "token_ids" not in path.read_text()
    assert path.parent.name == DATASETS


def test_manifest_that_was_altered_is_refused(site, taken):
    drafts = site.directory / "drafts"
    manifest = manifest_of(*taken)
    path = save_manifest(drafts, manifest)
    path.write_text(path.read_text().replace("clinic", "court1"))
    with pytest.raises(DraftRefusedError, match="altered"):
        open_dataset(site.settings, manifest.digest)


def test_data_set_that_cannot_be_written_is_a_storage_error(tmp_path, taken):
    (tmp_path / "file").write_text("")
    with pytest.raises(DraftStorageError, match="cannot write"):
        save_manifest(tmp_path / "file", manifest_of(*taken))
