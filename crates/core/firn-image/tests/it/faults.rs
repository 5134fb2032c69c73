//! Every fault point of this crate, walked in child processes: the disk fails or Firn dies, at each
//! step.

use std::path::Path;
use std::process::{Command, ExitStatus};

use firn_image::{Codec, Geometry, Image, remove_partial, verify_image};

use crate::model::Model;

const DIR: &str = "FIRN_IMAGE_TEST_DIR";
const WRITING: [&str; 6] =
    ["image.create", "image.write", "image.index", "image.footer", "image.sync", "image.rename"];

fn old() -> Model {
    Model::mixed(Geometry::new(60), Codec::Lz4)
}

fn new() -> Model {
    Model::mixed(Geometry::new(90), Codec::None)
}

/// Runs one of the child tests below, with a fault armed.
fn child(name: &str, dir: &Path, fault: &str) -> ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--test-threads=1"])
        .env(DIR, dir)
        .env(firn_fault::VARIABLE, fault)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap()
}

fn dir_of_child() -> std::path::PathBuf {
    std::env::var_os(DIR).unwrap().into()
}

#[test]
#[ignore = "run as a child by the tests below"]
fn child_writes() {
    let path = dir_of_child().join("a.firn");
    let model = new();
    let result = model.try_write(&path);
    let error = result.unwrap_err();
    let names: Vec<_> = std::fs::read_dir(dir_of_child()).unwrap().collect();
    assert_eq!(names.len(), 1, "only the old image is left after: {error}");
}

#[test]
#[ignore = "run as a child by the tests below"]
fn child_reads() {
    let path = dir_of_child().join("a.firn");
    let error = match Image::open(&path) {
        Err(error) => error.to_string(),
        Ok(image) => {
            let report = verify_image(&image, 1, &|_, _| ());
            report.problems.first().unwrap().to_string()
        }
    };
    assert!(error.contains("read") || error.contains("open"), "{error}");
}

#[test]
fn a_failing_disk_leaves_the_old_image_and_nothing_else() {
    for point in WRITING {
        for errno in ["ENOSPC", "EIO"] {
            for pass in [1, 2, 5] {
                let dir = tempfile::tempdir().unwrap();
                let path = dir.path().join("a.firn");
                old().write(&path);
                let fault = format!("{point}@{pass}={errno}");
                let passes_once = !["image.write", "image.index"].contains(&point);
                if pass == 1 || !passes_once {
                    assert!(child("faults::child_writes", dir.path(), &fault).success(), "{fault}");
                    old().check(&Image::open(&path).unwrap());
                }
            }
        }
    }
}

#[test]
fn a_killed_writer_leaves_the_old_image_and_a_partial_file_that_the_next_one_removes() {
    for point in WRITING {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.firn");
        old().write(&path);
        let status = child("faults::child_writes", dir.path(), point);
        assert!(!status.success(), "{point}");
        old().check(&Image::open(&path).unwrap());
        let left = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left, if point == "image.create" { 1 } else { 2 }, "{point}");
        assert_eq!(remove_partial(&path).unwrap(), left == 2);
        let status = child("faults::child_writes", dir.path(), point);
        assert!(!status.success(), "{point}");
        new().write(&path);
        new().check(&Image::open(&path).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

#[test]
fn a_read_error_of_the_disk_is_reported() {
    for fault in ["image.open=EIO", "image.read=EIO", "image.read@2=EIO", "image.read@4=EIO"] {
        let dir = tempfile::tempdir().unwrap();
        old().write(&dir.path().join("a.firn"));
        assert!(child("faults::child_reads", dir.path(), fault).success(), "{fault}");
    }
}
