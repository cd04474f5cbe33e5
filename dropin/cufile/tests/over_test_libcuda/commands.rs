//! `beeline gdsio` and `beeline cufile stats`.

use crate::tools::Bench;

#[test]
fn gdsio_moves_compares_and_reports() {
    let Some(bench) = Bench::built() else { return };
    let files = bench.folder().join("files");
    let (files, beeline) = (files.to_str().unwrap().to_owned(), bench.command());
    let shared = format!("{files}/shared");
    let cases: [&[&str]; 6] = [
        &["-D", &files, "-w", "2", "-s", "4M", "-i", "64K", "-I", "1", "-V"],
        &["-D", &files, "-w", "2", "-s", "4M", "-i", "64K", "-I", "0", "-V"],
        &["-f", &shared, "-w", "3", "-s", "3M", "-i", "4097", "-I", "3", "-V"],
        &["-f", &shared, "-w", "3", "-s", "3M", "-i", "4097", "-I", "2", "-x", "6", "-V"],
        &["-f", &shared, "-s", "2M", "-i", "1M", "-I", "1", "-x", "6", "-V"],
        &["-f", &shared, "-s", "2M", "-i", "1M", "-T", "0.1"],
    ];
    for case in cases {
        let args: Vec<&str> = ["gdsio"].iter().chain(case).copied().collect();
        let output = bench.run(&beeline, &args, &[]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{case:?}: {text}");
        for word in ["IoType: ", "Throughput: ", "GiB/sec", "Avg_Latency: ", "p99: ", "s/GiB"] {
            assert!(text.contains(word), "{case:?}: {text}");
        }
        assert_eq!(text.contains("compared equal"), case.contains(&"-V"), "{case:?}: {text}");
    }
    for case in [&["-D", &files, "-x", "7"][..], &["-i", "1M"], &["-f", &shared, "-i", "0"]] {
        let args: Vec<&str> = ["gdsio"].iter().chain(case).copied().collect();
        assert_eq!(bench.run(&beeline, &args, &[]).status.code(), Some(2), "{case:?}");
    }
}

#[test]
fn statistics_are_left_for_the_command() {
    let Some(bench) = Bench::built() else { return };
    let (folder, beeline) = (bench.folder().to_str().unwrap().to_owned(), bench.command());
    let shared = format!("{folder}/files/shared");
    let args = ["gdsio", "-f", &shared, "-s", "2M", "-i", "64K"];
    let run = bench.run(&beeline, &args, &[("BEELINE_CUFILE_STATS", &folder)]);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
    std::fs::write(format!("{folder}/beeline-cufile-1.json"), "broken").unwrap();
    let output = bench.run(&beeline, &["cufile", "stats", &folder], &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("CPU-S/GiB"), "{text}");
    // Two MiB in 32 reads, out of the page cache or (on a drive) past it.
    assert!(text.contains("beeline") && text.contains(" 32 "), "{text}");
    assert!(text.contains("holds no statistics"), "{text}");
    assert_eq!(bench.run(&beeline, &["cufile", "stats"], &[]).status.code(), Some(2));
}
