"""Builds are reproducible, and no named image is missing."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest
import yaml

from appliance.errors import BundleIncompleteError, BundleRefusedError, ConfigurationError
from appliance.sovereignty.bundle.build import build_bundle, join_difference, make_difference
from appliance.sovereignty.bundle.emit import CHART_IMAGES, Form, emit
from appliance.sovereignty.bundle.engine import Engine, saved_form
from appliance.sovereignty.bundle.manifest import BundleManifest, ItemKind
from appliance.sovereignty.bundle.parts import open_source, split
from appliance.sovereignty.bundle.recipe import load_recipe
from appliance.sovereignty.bundle.references import check_complete, check_listed, images_in
from tests.bundles import (
    DATABASE,
    GATEWAY,
    Workshop,
    all_files,
    digest_of,
    image_config,
    tar_of,
    write_chart,
    write_oci_image,
    write_saved_image,
)

ROOT = Path(__file__).parents[4]
SAID = {"licence": "MIT", "origin": "https://example.com/x"}


def manifest_of(directory) -> BundleManifest:
    return BundleManifest.decode((directory / "MANIFEST.json").read_bytes(), "MANIFEST.json")


def item(directory, label: str):
    return next(each for each in manifest_of(directory).items if each.label == label)


def test_two_builds_are_the_same_to_the_byte(workshop):
    """Signature included; the second is built from copies of the inputs made later, in another order."""
    first = workshop.build(name="first")
    inputs = workshop.place / "inputs-1.0.0"
    weights = inputs / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content)
    recipe = yaml.safe_load((inputs / "bundle.yaml").read_text())
    second = workshop.build(name="second", images=recipe["images"][::-1])
    assert all_files(first) == all_files(second)
    assert len(all_files(first)) > 20


def test_progress_ends_with_every_byte(workshop, bundle):
    """Building, splitting and joining say how much there is before they begin."""
    recipe = workshop.recipe("1.0.0")
    opened = workshop.open_bundle(bundle)
    steps = {
        "build": lambda count: build_bundle(
            load_recipe(recipe), recipe.parent, workshop.place / "out", workshop.stamp, None, count
        ),
        "split": lambda count: split(opened.head, opened.contents, workshop.place / "parts", 7000, count),
        "join": lambda count: join_difference(opened, workshop.place / "whole", count),
    }
    for name, step in steps.items():
        counted: list[tuple[int, int]] = []
        step(lambda done, total, into=counted: into.append((done, total)))
        done = [each for each, _ in counted]
        assert done == sorted(done), name
        assert counted[0][1] > counted[0][0], name
        if name != "build":  # which also writes what it makes: manifests and indexes
            assert counted[-1] == (counted[0][1], counted[0][1]), name


def test_two_splits_and_two_differences_are_the_same_to_the_byte(workshop, bundle):
    """A medium can be compared with one that was built elsewhere."""
    newer = workshop.build("1.1.0")
    for name in ("one", "two"):
        opened = workshop.open_bundle(newer)
        split(opened.head, opened.contents, workshop.place / f"parts-{name}", 5000)
        make_difference(workshop.open_bundle(bundle), opened, workshop.place / f"difference-{name}")
    for kind in ("parts", "difference"):
        assert all_files(workshop.place / f"{kind}-one") == all_files(workshop.place / f"{kind}-two")


def test_a_bundle_is_an_oci_image_layout(bundle):
    """Every document is where another tool looks for it, and names what is there."""
    assert json.loads((bundle / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((bundle / "index.json").read_bytes())
    for entry in index["manifests"]:
        content = (bundle / "blobs" / entry["digest"].replace(":", "/")).read_bytes()
        assert (digest_of(content), len(content)) == (entry["digest"], entry["size"])
        document = json.loads(content)
        for child in (document["config"], *document["layers"]):
            assert (bundle / "blobs" / child["digest"].replace(":", "/")).stat().st_size == child["size"]


def test_an_oci_image_keeps_its_digest_and_a_saved_one_its_id(workshop, bundle):
    """So that registries and engines elsewhere use the same name."""
    archive = workshop.place / "again.tar"
    assert item(bundle, DATABASE).digest == write_oci_image(archive, DATABASE, b"a database" * 50)
    layers = [tar_of({"file-0": b"base layer" * 50}), tar_of({"file-1": b"1.0.0"})]
    assert item(bundle, GATEWAY).image_id == digest_of(image_config(*layers))


def test_every_item_has_licence_origin_and_bill_of_materials(bundle):
    """The bill of materials is a blob of the bundle."""
    manifest = manifest_of(bundle)
    assert all(each.licence == "Apache-2.0" and each.origin for each in manifest.items)
    sbom = item(bundle, GATEWAY).sbom
    assert (bundle / "blobs" / sbom.replace(":", "/")).read_bytes() == b'{"bomFormat":"CycloneDX"}'
    assert {each.kind for each in manifest.items} == set(ItemKind)


def test_weights_are_one_blob_per_file_without_download_caches(bundle):
    """Hidden files contain times, which would make builds differ."""
    digest = item(bundle, "model/demo/target:r1").digest
    document = json.loads((bundle / "blobs" / digest.replace(":", "/")).read_bytes())
    titles = [layer["annotations"]["org.opencontainers.image.title"] for layer in document["layers"]]
    assert titles == ["config.json", "model.safetensors", "tokenizer/vocab.json"]


def test_a_saved_image_whose_layers_are_links_to_each_other_is_read(workshop):
    """As `docker save` writes layers that are alike."""
    path = workshop.recipe().parent / "gateway.tar"
    layer = tar_of({"x": b"x"})
    listed = [{"Config": "c.json", "RepoTags": [GATEWAY], "Layers": ["a/layer.tar", "b/layer.tar"]}]
    content = tar_of(
        {
            "c.json": image_config(layer, layer),
            "manifest.json": json.dumps(listed).encode(),
            "a/layer.tar": layer,
        }
    )
    path.write_bytes(content)
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("b/layer.tar")
        link.type, link.linkname = tarfile.SYMTYPE, "../a/layer.tar"
        tar.addfile(link)
    recipe = path.parent / "bundle.yaml"
    manifest = build_bundle(load_recipe(recipe), path.parent, workshop.place / "linked", workshop.stamp, None)
    assert workshop.verify(workshop.place / "linked").manifest == manifest


def test_multi_platform_image_keeps_its_index_and_loads_one_platform(workshop):
    """Each by the digest it had; what is loaded is the one of this machine."""
    recipe = workshop.recipe()
    files, entries = {}, []
    for architecture in ("amd64", "arm64"):
        write_oci_image(recipe.parent / "one.tar", DATABASE, architecture.encode())
        with tarfile.open(recipe.parent / "one.tar") as tar:
            found = {member.name: tar.extractfile(member).read() for member in tar}
        (entry,) = json.loads(found["index.json"])["manifests"]
        entries.append({**entry, "platform": {"os": "linux", "architecture": architecture}})
        files |= found
    index = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    kind = "application/vnd.oci.image.index.v1+json"
    root = {"mediaType": kind, "digest": digest_of(index), "size": len(index)}
    files |= {
        f"blobs/{digest_of(index).replace(':', '/')}": index,
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [root]}).encode(),
    }
    (recipe.parent / "several.tar").write_bytes(tar_of(files))
    images = [{"archive": "several.tar", "reference": DATABASE, **SAID}]
    bundle = workshop.build(name="several", images=images, charts=[], rendered=[])
    assert (item(bundle, DATABASE).digest, item(bundle, DATABASE).image_id) == (digest_of(index), None)
    opened = workshop.verify(bundle)
    (tree,) = [each for each in opened.trees() if each.item.label == DATABASE]
    assert [f"sha256:{file.sha256}" for file in tree.documents][-1] == digest_of(index)
    for machine, architecture in (("x86_64", b"amd64"), ("aarch64", b"arm64")):
        chosen = Engine(command=["docker"], machine=machine).choose(tree)
        saved = b"".join(saved_form(chosen, DATABASE, opened))
        with tarfile.open(fileobj=io.BytesIO(saved)) as tar:
            (listed,) = json.load(tar.extractfile("manifest.json"))
            layer = gzip.decompress(tar.extractfile(listed["Layers"][0]).read())
        assert architecture in layer
        assert listed["RepoTags"] == [DATABASE]


class TestCompleteness:
    """No image is named that the bundle lacks, and none by its tag only."""

    @pytest.fixture
    def digest(self, bundle) -> str:
        return item(bundle, DATABASE).digest

    def test_images_of_kubernetes_and_compose_documents_are_found(self):
        """Init containers, image volumes, lists, several documents, compose defaults; not other texts."""
        text = """
spec:
  initContainers: [{name: a, image: "one@sha256:1"}]
  containers: [{name: b, image: two:1}]
  volumes: [{name: weights, image: {reference: three:1, pullPolicy: Always}}]
---
services: {x: {image: "${GATEWAY_IMAGE:-four:1}"}, y: {image: '', build: .}}
---
kind: ConfigMap
data: {imagePolicy: "five:1"}
"""
        assert [each.reference for each in images_in(text, "x")] == [
            "four:1",
            "one@sha256:1",
            "three:1",
            "two:1",
        ]

    def test_an_image_counts_by_manifest_digest_and_by_image_id(self, bundle, digest):
        """With a tag before it or without, from whichever registry."""
        image_id = item(bundle, GATEWAY).image_id
        text = f"a: {{image: 'r.example:5000/postgres:15@{digest}'}}\nb: {{image: '{image_id}'}}"
        check_complete(manifest_of(bundle), images_in(text, "x"))

    @pytest.mark.parametrize("reference", [DATABASE, "postgres", "postgres@sha256:15"])
    def test_an_image_named_without_a_digest_is_refused(self, bundle, reference):
        """Although the bundle has it: the tag may move."""
        with pytest.raises(BundleIncompleteError, match=f"chart names {reference} without a digest"):
            check_complete(manifest_of(bundle), images_in(f"image: {reference}", "chart"))

    def test_an_image_the_bundle_lacks_stops_the_build(self, workshop):
        """Named by a rendered file; nothing is left behind."""
        recipe = workshop.recipe()
        missing = f"grafana/grafana@sha256:{'0' * 64}"
        (recipe.parent / "compose.yaml").write_text(f"services: {{g: {{image: '{missing}'}}}}")
        with pytest.raises(BundleIncompleteError, match="which is not in the bundle"):
            build_bundle(load_recipe(recipe), recipe.parent, workshop.place / "out", workshop.stamp, None)
        assert not list(workshop.place.glob("*out*"))

    def test_chart_images_come_from_its_annotation_or_rendering(self, workshop, digest):
        """Helm gives the better answer, with the values of the recipe; without it the list counts."""
        recipe = workshop.recipe()
        write_chart(recipe.parent / "chart.tgz", ["grafana/grafana:11"])
        document = yaml.safe_load(recipe.read_text())
        document["charts"][0]["values"] = ["everything.yaml"]
        recipe.write_text(yaml.safe_dump(document))
        seen = []

        def render(chart, values, more) -> str:
            seen.append((chart.name, [path.name for path in values], yaml.safe_load(more)["images"]))
            return f"image: postgres@{digest}"

        with pytest.raises(BundleIncompleteError, match="grafana"):
            build_bundle(load_recipe(recipe), recipe.parent, workshop.place / "out", workshop.stamp, None)
        build_bundle(load_recipe(recipe), recipe.parent, workshop.place / "out", workshop.stamp, render)
        gateway = item(workshop.place / "out", GATEWAY).digest
        images = {
            "gateway": {"repository": "sovereign-appliance/gateway", "digest": gateway},
            "postgres": {"repository": "library/postgres", "digest": digest},
        }
        assert seen == [("chart.tgz", ["everything.yaml"], images)]

    def test_bundle_must_contain_images_a_chart_lists_by_tag(self, bundle):
        """A digest is accepted as well; images that the site never uses are listed under `unused`."""
        manifest = manifest_of(bundle)
        listed = images_in(f"[{{image: 'postgres:15'}}, {{image: '{GATEWAY}'}}, {{image: 'gpu:1'}}]", "chart")
        with pytest.raises(BundleIncompleteError, match=r"chart lists gpu:1.*`unused`"):
            check_listed(manifest, listed, ())
        check_listed(manifest, listed, ("gpu:1",))
        with pytest.raises(BundleIncompleteError, match="not in the bundle"):
            check_listed(manifest, images_in(f"image: 'x@sha256:{'0' * 64}'", "chart"), ())

    def test_a_compose_file_gets_the_images_of_the_bundle(self, workshop, bundle):
        """Where it takes them from variables, as ours does."""
        recipe = workshop.recipe("1.1.0")
        compose = recipe.parent / "compose.yaml"
        compose.write_text("services: {g: {image: '${GATEWAY_IMAGE:-gateway:1}'}}")
        workshop.build("1.2.0", rendered=[str(compose)])
        compose.write_text("services: {g: {image: '${GRAFANA_IMAGE:-grafana:1}'}}")
        with pytest.raises(BundleIncompleteError, match="names grafana:1 without a digest"):
            workshop.build("1.3.0", rendered=[str(compose)])


class TestRefusedRecipes:
    """The error is one line, and no file remains."""

    def refused(self, workshop: Workshop, **changes: object) -> str:
        path = workshop.recipe(**changes)
        with pytest.raises(ConfigurationError) as caught:
            build_bundle(load_recipe(path), path.parent, workshop.place / "out", workshop.stamp, None)
        assert not list(workshop.place.glob("*out*"))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_a_recipe_must_fit(self, workshop):
        """Unknown members, versions that cannot be compared, missing licences."""
        assert "notes" in self.refused(workshop, notes="x")
        assert "upgrade_from" in self.refused(workshop, upgrade_from="1")
        assert "images.0.licence" in self.refused(workshop, images=[{"archive": "x", "reference": GATEWAY}])
        with pytest.raises(ConfigurationError, match="cannot read the recipe"):
            load_recipe(workshop.place / "none")

    @pytest.mark.parametrize(
        ("archive", "problem"),
        [
            (b"no tar", "not an image archive"),
            (tar_of({"x": b"x"}), "it is not an image"),
            (tar_of({"manifest.json": b"{}"}), "not what `docker save` writes"),
            (tar_of({"index.json": b"[]"}), "not an OCI index"),
            (tar_of({"manifest.json": b'[{"Config":"c","RepoTags":null,"Layers":[]}]'}), "lacks c"),
        ],
    )
    def test_an_archive_must_hold_the_image(self, workshop, archive, problem):
        """For every defect."""
        (workshop.place / "inputs-1.0.0").mkdir()
        (workshop.place / "inputs-1.0.0" / "broken.tar").write_bytes(archive)
        image = {"archive": "broken.tar", "reference": GATEWAY, **SAID}
        assert problem in self.refused(workshop, images=[image])

    def test_an_image_is_chosen_by_name_among_several(self, workshop):
        """And not guessed."""
        recipe = workshop.recipe()
        path = recipe.parent / "several.tar"
        write_saved_image(path, "other:1", b"x")
        with tarfile.open(path) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}
        listed = json.loads(files["manifest.json"])
        files["manifest.json"] = json.dumps([*listed, {**listed[0], "RepoTags": ["another:1"]}]).encode()
        path.write_bytes(tar_of(files))
        images = [{"archive": "several.tar", "reference": "third:1", **SAID}]
        assert "not exactly one named third:1" in self.refused(workshop, images=images)

    def test_blob_with_another_digest_is_refused(self, workshop):
        """An archive that was damaged on its way to the builder."""
        recipe = workshop.recipe()
        path = recipe.parent / "damaged.tar"
        write_oci_image(path, DATABASE, b"x")
        with tarfile.open(path) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}
        layer = next(name for name in files if name.startswith("blobs"))
        path.write_bytes(tar_of(files | {layer: files[layer] + b"!"}))
        assert "should have sha256:" in self.refused(
            workshop, images=[{"archive": "damaged.tar", "reference": DATABASE, **SAID}]
        )

    def test_missing_or_duplicate_inputs_are_refused(self, workshop):
        """Weights, charts, files."""
        model = {"name": "m", "version": "1", "directory": "none", **SAID}
        assert "is not a directory" in self.refused(workshop, models=[model])
        assert "not a packaged chart" in self.refused(workshop, charts=[{"file": "compose.yaml", **SAID}])
        wheels = {"name": "w", "version": "1", "files": ["none.whl"], **SAID}
        assert "cannot read" in self.refused(workshop, wheels=[wheels])
        twice = {**wheels, "files": ["compose.yaml", "compose.yaml"]}
        assert "two files would be loaded to compose.yaml" in self.refused(workshop, wheels=[twice])
        one = {**wheels, "files": ["compose.yaml"]}
        assert "twice" in self.refused(workshop, wheels=[one, one])

    @pytest.mark.parametrize("kind", ["models", "wheels", "files"])
    def test_two_versions_of_one_item_are_refused(self, workshop, kind):
        """Both would be loaded to one place: one link, or one file written over the other."""
        what = {"directory": "model"} if kind == "models" else {"files": ["compose.yaml"]}
        things = [{"name": "demo/target", "version": version, **what, **SAID} for version in ("r1", "r2")]
        message = self.refused(workshop, **{kind: things})
        assert (
            f"two versions of {kind.removesuffix('s') if kind == 'models' else kind}/demo/target" in message
        )
        assert "r1 and r2" in message
        names = [{**thing, "name": f"demo/{thing['version']}"} for thing in things]
        workshop.build("1.5.0", **{kind: names})

    def test_chart_whose_version_leaves_the_directory_is_refused(self, workshop):
        """It would be loaded there; charts of others are taken as they come."""
        recipe = workshop.recipe()
        write_chart(recipe.parent / "outside.tgz", [], "1/../../../../outside")
        assert "must not leave it" in self.refused(workshop, charts=[{"file": "outside.tgz", **SAID}])

    def test_build_refuses_an_existing_directory(self, workshop, bundle):
        """Not over a bundle either."""
        before = all_files(bundle)
        with pytest.raises(ConfigurationError, match="exists already"):
            workshop.build()
        assert all_files(bundle) == before


class TestCarrying:
    """Differences, parts, and the whole again."""

    def test_difference_has_only_new_blobs_and_joins_to_the_whole(self, workshop, bundle):
        """The changed weights travel, the unchanged files of the model do not."""
        newer = workshop.build("1.1.0", weights=b"other weights" * 1000)
        opened = make_difference(
            workshop.open_bundle(bundle), workshop.open_bundle(newer), workshop.place / "difference"
        )
        assert sum(len(content) for content in all_files(workshop.place / "difference").values()) < sum(
            len(content) for content in all_files(newer).values()
        )
        assert len(opened.omitted()) > 10
        join_difference(workshop.verify(workshop.place / "difference", base=bundle), workshop.place / "whole")
        assert all_files(workshop.place / "whole") == all_files(newer)

    def test_joined_parts_are_the_bundle_and_a_tar_file(self, workshop, bundle):
        """Directly from the parts, with any size."""
        for size in (1024, 4096, 10**9):
            opened = workshop.open_bundle(bundle)
            place = workshop.place / f"parts-{size}"
            index = split(opened.head, opened.contents, place, size)
            assert all(part.size <= size for part in index.parts)
            join_difference(workshop.verify(place), workshop.place / f"whole-{size}")
            assert all_files(workshop.place / f"whole-{size}") == all_files(bundle)
        joined = b"".join(
            part.read_bytes() for part in sorted((workshop.place / "parts-1024").glob("bundle*"))
        )
        (workshop.place / "joined.tar").write_bytes(joined)
        with tarfile.open(workshop.place / "joined.tar") as tar:
            found = {member.name: tar.extractfile(member).read() for member in tar}
        assert found == all_files(bundle)

    def test_impossible_differences_are_refused(self, workshop, bundle):
        """Of two products, and of a difference."""
        other = workshop.build("1.1.0", name="other")
        make_difference(
            workshop.open_bundle(bundle), workshop.open_bundle(other), workshop.place / "difference"
        )
        difference = workshop.open_bundle(workshop.place / "difference")
        with pytest.raises(BundleRefusedError, match="join it first"):
            make_difference(workshop.open_bundle(bundle), difference, workshop.place / "out")
        named = workshop.build("1.2.0", name="named")
        workshop.resign(named, manifest_of(named).model_copy(update={"name": "another"}))
        with pytest.raises(BundleRefusedError, match="not two versions"):
            make_difference(workshop.open_bundle(bundle), workshop.open_bundle(named), workshop.place / "out")
        assert not (workshop.place / "out").exists()

    def test_too_many_parts_are_refused_before_writing(self, workshop, bundle):
        """FAT32 limits the number of names as well."""
        opened = workshop.open_bundle(bundle)
        with pytest.raises(ConfigurationError, match="more than 9999 parts"):
            split(opened.head, opened.contents, workshop.place / "parts", 1)
        assert not (workshop.place / "parts").exists()

    def test_there_must_be_a_bundle(self, workshop):
        """And an index of parts must be one."""
        with pytest.raises(ConfigurationError, match="no bundle at"):
            open_source(workshop.place / "none")
        (workshop.place / "text").write_text("x" * 1000)
        with pytest.raises(BundleRefusedError, match="is not a bundle"):
            open_source(workshop.place / "text").head()


class TestEmitted:
    """Other tools get the same images."""

    def test_the_list_of_images_pins_each_by_its_digest(self, bundle):
        """One a line."""
        lines = emit(manifest_of(bundle), Form.IMAGES).splitlines()
        assert lines == [
            f"docker.io/library/postgres@{item(bundle, DATABASE).digest}",
            f"sovereign-appliance/gateway@{item(bundle, GATEWAY).digest}",
        ]

    def test_helm_and_compose_receive_digests_by_image_name(self, bundle):
        """Manifest digests for a registry, image ids for an engine."""
        values = yaml.safe_load(emit(manifest_of(bundle), Form.HELM))
        assert values["images"] == {
            "gateway": {"repository": "sovereign-appliance/gateway", "digest": item(bundle, GATEWAY).digest},
            # As `load --registry` pushes it: without the host it came from.
            "postgres": {"repository": "library/postgres", "digest": item(bundle, DATABASE).digest},
        }
        assert f"GATEWAY_IMAGE={item(bundle, GATEWAY).image_id}\n" in emit(manifest_of(bundle), Form.COMPOSE)

    def test_the_charts_images_are_those_of_our_chart(self):
        """As its values name them."""
        values = yaml.safe_load((ROOT / "deploy" / "helm" / "values.yaml").read_text())["images"]
        assert {name for name in values if isinstance(values[name], dict)} == set(CHART_IMAGES.values())
        for short, name in CHART_IMAGES.items():
            assert values[name]["repository"].rpartition("/")[2] == short

    def test_oc_mirror_and_zarf_get_images_and_charts(self, bundle):
        """In the format of each."""
        lines = emit(manifest_of(bundle), Form.IMAGES).splitlines()
        mirror = yaml.safe_load(emit(manifest_of(bundle), Form.OC_MIRROR))
        assert (mirror["apiVersion"], mirror["kind"]) == (
            "mirror.openshift.io/v2alpha1",
            "ImageSetConfiguration",
        )
        assert [image["name"] for image in mirror["mirror"]["additionalImages"]] == lines
        chart = "charts/sovereign-appliance-1.0.0.tgz"
        assert mirror["mirror"]["helm"]["local"] == [{"name": "sovereign-appliance", "path": chart}]
        zarf = yaml.safe_load(emit(manifest_of(bundle), Form.ZARF))
        assert (zarf["kind"], zarf["metadata"]["version"]) == ("ZarfPackageConfig", "1.0.0")
        assert zarf["components"][0]["images"] == lines
        assert zarf["components"][0]["charts"][0]["localPath"] == chart
