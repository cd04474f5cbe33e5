//! Handed cases (STOR, STOR-DATA) that concern a program that calls the interface: the right answer as
//! code and message.

use std::path::Path;

use crate::tools::Bench;

/// Registers a file and a buffer, reads, and prints the codes; the log goes to the same place.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <cufile.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define F(name) __typeof__(&name) p_##name = (__typeof__(&name))dlsym(l, #name)
int main(int c, char **v) {
    void *l = dlopen(v[1], RTLD_NOW);
    F(cuFileHandleRegister); F(cuFileBufRegister); F(cuFileRead); F(cuFileHandleDeregister);
    int fd = open(v[2], O_RDWR | O_DIRECT);
    printf("open %s\n", fd < 0 ? strerror(errno) : "direct");
    if (fd < 0) fd = open(v[2], O_RDWR);
    CUfileDescr_t d = {.type = 1, .handle.fd = fd};
    CUfileHandle_t h = NULL;
    printf("register %d\n", p_cuFileHandleRegister(&h, &d).err);
    static char buffer[1 << 20];
    printf("buffer %d\n", p_cuFileBufRegister(buffer, sizeof buffer, 0).err);
    size_t size = atol(v[3]);
    printf("read %zd\n", p_cuFileRead(h, buffer, size, 0, 0));
    p_cuFileHandleDeregister(h);
    return 0;
}
"#;

struct Case {
    name: &'static str,
    /// Where the file lies.
    folder: &'static str,
    bytes: usize,
    ask: &'static str,
    json: &'static str,
    expected: &'static [&'static str],
    not: &'static [&'static str],
}

const CASES: &[Case] = &[
    Case {
        // compat off, no path past host memory: an error that says so, when the file is registered.
        name: "STOR-02 compatibility forbidden",
        folder: "",
        bytes: 4096,
        ask: "4096",
        json: r#"{ "properties": { "allow_compat_mode": false } }"#,
        expected: &["register 5001", "allow_compat_mode is false", "to true", "read -5027"],
        not: &["register 0"],
    },
    Case {
        // A file system without a block device or a udev entry is served, and 5030 is no answer.
        name: "STOR-06, STOR-07 no udev entry",
        folder: "/dev/shm",
        bytes: 10_000,
        ask: "10000",
        json: "{}",
        expected: &["register 0", "read 10000"],
        not: &["5030", "5027"],
    },
    Case {
        // Which way did the bytes go? The log says at the end, by route.
        name: "STOR-09 the path that was used",
        folder: "",
        bytes: 10_000,
        ask: "10000",
        json: "{}",
        expected: &["routes: page cache", "bytes by route", "host=10000"],
        not: &[],
    },
    Case {
        // The limit on pinned memory is no limit on registered buffers here.
        name: "STOR-12 a small pinned limit",
        folder: "",
        bytes: 4096,
        ask: "4096",
        json: r#"{ "properties": { "max_device_pinned_mem_size_kb": 64 } }"#,
        expected: &["buffer 0", "read 4096"],
        not: &[],
    },
    Case {
        // Asked for whole blocks beyond the end of a file: the exact remainder.
        name: "STOR-DATA-01 the end of a file with O_DIRECT",
        folder: "",
        bytes: 10_001,
        ask: "12288",
        json: r#"{ "properties": { "force_odirect_mode": true } }"#,
        expected: &["register 0", "read 10001"],
        not: &[],
    },
    Case {
        // With and without an open that succeeds: never called direct.
        name: "STOR-DATA-02 tmpfs and O_DIRECT",
        folder: "/dev/shm",
        bytes: 8192,
        ask: "8192",
        json: "{}",
        expected: &["register 0", "routes: page cache;", "file_system=tmpfs", "read 8192"],
        not: &["direct for what is not in it"],
    },
];

#[test]
fn handed_cases_have_their_answers() {
    let Some(bench) = Bench::built() else { return };
    let source = bench.folder().join("case.c");
    std::fs::write(&source, PROGRAM).unwrap();
    let Some(program) = bench.compile(&source, &[]) else { return };
    for case in CASES {
        let folder = match case.folder {
            "" => tempfile::tempdir_in(bench.folder()),
            folder => tempfile::tempdir_in(Path::new(folder)),
        };
        let Ok(folder) = folder else {
            println!("SKIP {}", case.folder);
            continue;
        };
        let (file, json) = (folder.path().join("file"), bench.folder().join("case.json"));
        std::fs::write(&file, vec![7; case.bytes]).unwrap();
        std::fs::write(&json, case.json).unwrap();
        let args = [bench.cufile.to_str().unwrap(), file.to_str().unwrap(), case.ask];
        let env = [("CUFILE_ENV_PATH_JSON", json.to_str().unwrap()), ("BEELINE_LOG", "debug")];
        let output = bench.run(&program, &args, &env);
        let text = String::from_utf8_lossy(&output.stdout);
        for part in case.expected {
            assert!(text.contains(part), "{}: no {part:?} in\n{text}", case.name);
        }
        for part in case.not {
            assert!(!text.contains(part), "{}: {part:?} in\n{text}", case.name);
        }
    }
}
