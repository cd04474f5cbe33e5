//! `beeline bench p2p` between simulated devices.

use super::support::{beeline, beeline_with, command};

#[test]
fn every_ordered_pair_is_measured_and_says_simulated() {
    let run = |json: bool| {
        let mut command = command();
        command.args(["bench", "p2p", "--bytes", "1M", "--devices", "sim:0,sim:1,sim:2"]);
        command.env("BEELINE_SIM_DEVICES", "3").env("BEELINE_SIM_MEMORY", "64M");
        if json {
            command.arg("--json");
        }
        super::support::Run::from(command.output().unwrap()).ok()
    };
    let json = run(true).json();
    assert_eq!(json["simulated"], true);
    let pairs = json["pairs"].as_array().unwrap();
    assert_eq!(pairs.len(), 6);
    for pair in pairs {
        assert_eq!(pair["route"], "direct");
        let figures = pair["figures"].as_array().unwrap();
        let rates = figures.iter().filter(|figure| figure["mb_per_s"].as_u64().is_some());
        assert_eq!((figures.len(), rates.count()), (3, 2), "{pair}");
    }
    let text = run(false).stdout;
    for part in ["sim:2 (simulated)", "copy engine, one way", "direct", "microseconds"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn one_device_is_no_path() {
    let run = beeline(&["bench", "p2p", "--devices", "sim:0"]);
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("--devices"), "{run:?}");
}

#[test]
fn more_bytes_than_there_are_numbers_are_refused() {
    for bytes in ["18446744073709551615", "18446744073709551601"] {
        let args = ["bench", "p2p", "--devices", "sim:0,sim:1", "--bytes", bytes];
        let run = beeline_with(&[("BEELINE_SIM_DEVICES", "2")], &args);
        assert_eq!(run.code, Some(2), "{run:?}");
        assert!(run.stderr.contains(bytes), "{run:?}");
    }
}
