//! Handed cases (STOR, STOR-DATA) that concern a program that calls the interface: the right answer as
//! code and message.

use std::path::Path;

use crate::tools::Bench;

/// Registers a file and buffers, reads into host and device memory, writes back, and prints the codes; the log
/// goes to the same place.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <cufile.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#define F(name) __typeof__(&name) p_##name = (__typeof__(&name))dlsym(l, #name)
#define CU(name, ...) ((int (*)(__VA_ARGS__))dlsym(cuda, name))
int main(int c, char **v) {
    void *l = dlopen(v[1], RTLD_NOW), *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    F(cuFileHandleRegister); F(cuFileBufRegister); F(cuFileRead); F(cuFileWrite); F(cuFileHandleDeregister);
    F(cuFileDriverSetP2PFlags);
    int fd = open(v[2], O_RDWR | O_DIRECT);
    printf("open %s\n", fd < 0 ? strerror(errno) : "direct");
    if (fd < 0) fd = open(v[2], O_RDWR);
    CUfileDescr_t d = {.type = 1, .handle.fd = fd};
    CUfileHandle_t h = NULL;
    printf("register %d\n", p_cuFileHandleRegister(&h, &d).err);
    printf("peer to peer %d\n", p_cuFileDriverSetP2PFlags(0, 1).err);
    static char buffer[1 << 21], expected[1 << 21];
    printf("buffer %d\n", p_cuFileBufRegister(buffer, sizeof buffer, 0).err);
    size_t size = atol(v[3]), many = atol(v[5]);
    off_t at = atol(v[4]);
    for (size_t i = 0; i < many; i++) { /* never touched */
        void *large = mmap(NULL, 524288000, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        printf("large %zu %d\n", i + 1, p_cuFileBufRegister(large, 524288000, 0).err);
    }
    int plain = open(v[2], O_RDONLY);
    ssize_t there = pread(plain, expected, size, at);
    printf("read %zd\n", p_cuFileRead(h, buffer, size, at, 0));
    printf("data %s\n", there >= 0 && memcmp(buffer, expected, there) ? "DIFFERENT" : "same");
    int device = 0, bad;
    void *context;
    unsigned long long memory = 0;
    bad = CU("cuInit", unsigned)(0) || CU("cuDeviceGet", int *, int)(&device, 0)
        || CU("cuDevicePrimaryCtxRetain", void **, int)(&context, device) || CU("cuCtxSetCurrent", void *)(context)
        || CU("cuMemAlloc_v2", unsigned long long *, size_t)(&memory, sizeof buffer);
    printf("device memory %d\n", bad);
    ssize_t n = p_cuFileRead(h, (void *)memory, size, at, 0);
    memset(buffer, 0, sizeof buffer);
    CU("cuMemcpyDtoH_v2", void *, unsigned long long, size_t)(buffer, memory, sizeof buffer);
    printf("to the device %zd, data %s\n", n, n >= 0 && memcmp(buffer, expected, n) ? "DIFFERENT" : "same");
    printf("write %zd\n", p_cuFileWrite(h, (void *)memory, n < 0 ? 0 : n, at, 0));
    p_cuFileHandleDeregister(h);
    return 0;
}
"#;

struct Case {
    /// The numbers of the handed cases, and what they are about.
    name: &'static str,
    /// Where the file lies.
    folder: &'static str,
    bytes: usize,
    /// How much is read, and from where on.
    ask: (&'static str, &'static str),
    /// Large buffers that are registered first.
    buffers: &'static str,
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
        ask: ("4096", "0"),
        buffers: "0",
        json: r#"{ "properties": { "allow_compat_mode": false } }"#,
        expected: &["register 5001", "allow_compat_mode is false", "to true", "read -5027"],
        not: &["register 0"],
    },
    Case {
        // A file system without a block device or a udev entry is served, and 5030 is no answer.
        name: "STOR-06, STOR-07 no udev entry",
        folder: "/dev/shm",
        bytes: 10_000,
        ask: ("10000", "0"),
        buffers: "0",
        json: "{}",
        expected: &["register 0", "read 10000"],
        not: &["5030", "5027"],
    },
    Case {
        // Which way did the bytes go? The log says at the end, by route.
        name: "STOR-09 the path that was used",
        folder: "",
        bytes: 10_000,
        ask: ("10000", "0"),
        buffers: "0",
        json: "{}",
        expected: &["routes: page cache", "bytes by route", "page_cache=10000", "host=10000"],
        not: &[],
    },
    Case {
        // The limit on pinned memory is no limit on registered buffers here.
        name: "STOR-12 a small pinned limit",
        folder: "",
        bytes: 4096,
        ask: ("4096", "0"),
        buffers: "0",
        json: r#"{ "properties": { "max_device_pinned_mem_size_kb": 64 } }"#,
        expected: &["buffer 0", "read 4096"],
        not: &[],
    },
    Case {
        // Asked for whole blocks beyond the end of a file: the exact remainder.
        name: "STOR-DATA-01 the end of a file with O_DIRECT",
        folder: "",
        bytes: 10_001,
        ask: ("12288", "0"),
        buffers: "0",
        json: r#"{ "properties": { "force_odirect_mode": true } }"#,
        expected: &["register 0", "read 10001"],
        not: &[],
    },
    Case {
        // With and without an open that succeeds: never called direct.
        name: "STOR-DATA-02 tmpfs and O_DIRECT",
        folder: "/dev/shm",
        bytes: 8192,
        ask: ("8192", "0"),
        buffers: "0",
        json: "{}",
        expected: &["register 0", "routes: page cache;", "file_system=tmpfs", "read 8192"],
        not: &["direct for what is not in it"],
    },
    Case {
        // No drive's driver is asked here: without nvidia-fs, or with a kernel that is not patched for it, the
        // file is served all the same, and the log says by which way and why.
        name: "STOR-01, STOR-04, STOR-08 no native path",
        folder: "",
        bytes: 70_000,
        ask: ("70000", "0"),
        buffers: "0",
        json: r#"{ "properties": { "allow_compat_mode": true } }"#,
        expected: &[
            "register 0",
            "copied through pinned memory, as there is no nvidia-fs path here",
            "to the device 70000, data same",
        ],
        not: &["5030", "5001"],
    },
    Case {
        // P2PDMA asked for by the settings: there is none here, whatever lies below the file system; the call that
        // asks for it is refused, and the file is served.
        name: "STOR-03 RAID with P2PDMA",
        folder: "",
        bytes: 8192,
        ask: ("8192", "0"),
        buffers: "0",
        json: r#"{ "properties": { "use_pci_p2pdma": true } }"#,
        expected: &["register 0", "peer to peer 5008", "to the device 8192, data same"],
        not: &["5030"],
    },
    Case {
        // Registered buffers take nothing of BAR1: as many as the source's, and more.
        name: "STOR-05 BAR1 exhausted",
        folder: "",
        bytes: 4096,
        ask: ("4096", "0"),
        buffers: "8",
        json: "{}",
        expected: &["large 1 0", "large 8 0", "read 4096"],
        not: &[],
    },
    Case {
        // A file that is in the page cache is read out of it, also by a descriptor that was opened with O_DIRECT.
        name: "STOR-10 slower than the page cache",
        folder: "/dev/shm",
        bytes: 1 << 20,
        ask: ("1048576", "0"),
        buffers: "0",
        json: "{}",
        expected: &["to the device 1048576, data same", "page_cache=1048576", " direct=0"],
        not: &[],
    },
    Case {
        // The settings of one file system change no path here, and the log tells where written bytes went.
        name: "STOR-11 writes of one file system",
        folder: "",
        bytes: 4096,
        ask: ("4096", "0"),
        buffers: "0",
        json: r#"{ "properties": { "allow_compat_mode": true },
                   "fs": { "weka": { "rdma_write_support": false } } }"#,
        expected: &["register 0", "write 4096", " written=4096"],
        not: &["5030"],
    },
    Case {
        // Whatever the drive's block: nothing of it reaches the caller.
        name: "STOR-DATA-04 offsets and lengths that no block divides",
        folder: "",
        bytes: 1_100_000,
        ask: ("1048575", "513"),
        buffers: "0",
        json: r#"{ "properties": { "force_odirect_mode": true } }"#,
        expected: &[
            "read 1048575",
            "data same",
            "to the device 1048575, data same",
            "write 1048575",
        ],
        not: &["DIFFERENT"],
    },
    Case {
        // Asked for by the settings, not so in fact: what is told is what was done.
        name: "STOR-DATA-06 direct by the settings alone",
        folder: "/dev/shm",
        bytes: 1 << 20,
        ask: ("1048576", "0"),
        buffers: "0",
        json: r#"{ "properties": { "force_odirect_mode": true } }"#,
        expected: &["routes: page cache;", "page_cache=1048576", " direct=0"],
        not: &["direct for what is not in it"],
    },
];

/// Cases of the list that no call of the interface can show here, and why.
const ELSEWHERE: &[(&str, &str)] = &[
    ("STOR-DATA-03", "sizes around 0x7ffff000 are the group `huge` of conformance.c"),
    ("STOR-DATA-05", "there is no ZFS here; a file system that has no direct I/O is STOR-DATA-02"),
];

/// Each storage case of the list has a test here, or a reason.
#[test]
fn no_handed_case_is_left_out() {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/cases");
    let cases = std::env::var_os("BEELINE_CASES").map_or(beside, std::path::PathBuf::from);
    let Ok(text) = std::fs::read_to_string(cases.join("handed.md")) else {
        return println!("SKIP cases");
    };
    let heads = text.lines().filter_map(|line| line.strip_prefix("### H-STOR"));
    let numbers: Vec<String> =
        heads.filter_map(|head| Some(format!("STOR{}", head.split_whitespace().next()?))).collect();
    assert!(numbers.len() >= 18, "{numbers:?}");
    for number in numbers {
        let tested =
            CASES.iter().any(|case| case.name.split([' ', ',']).any(|word| word == number));
        let reasoned = ELSEWHERE.iter().any(|(name, _)| *name == number);
        assert!(tested != reasoned, "{number}");
    }
}

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
        let bytes: Vec<u8> = (0..case.bytes).map(|at| (at * 7 % 251) as u8).collect();
        std::fs::write(&file, bytes).unwrap();
        std::fs::write(&json, case.json).unwrap();
        let (library, (size, at)) = (bench.cufile.to_str().unwrap(), case.ask);
        let args = [library, file.to_str().unwrap(), size, at, case.buffers];
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
