/* The cuFile API as this library implements it: names, numbers and layouts of version 1.20 (x86-64).
 *
 * Written from the facts of the interface, not from NVIDIA's header; programs that were compiled with
 * that one work as they are. Sizes named kb are in units of 1024 bytes.
 */
#ifndef BEELINE_CUFILE_H
#define BEELINE_CUFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef CUDA_VERSION
typedef struct CUstream_st *CUstream;
typedef int CUresult;
#endif

enum CUfileOpError_enum {
    CU_FILE_SUCCESS = 0,
    CU_FILE_DRIVER_NOT_INITIALIZED = 5001,
    CU_FILE_DRIVER_INVALID_PROPS = 5002,
    CU_FILE_DRIVER_UNSUPPORTED_LIMIT = 5003,
    CU_FILE_DRIVER_VERSION_MISMATCH = 5004,
    CU_FILE_DRIVER_VERSION_READ_ERROR = 5005,
    CU_FILE_DRIVER_CLOSING = 5006,
    CU_FILE_PLATFORM_NOT_SUPPORTED = 5007,
    CU_FILE_IO_NOT_SUPPORTED = 5008,
    CU_FILE_DEVICE_NOT_SUPPORTED = 5009,
    CU_FILE_NVFS_DRIVER_ERROR = 5010,
    CU_FILE_CUDA_DRIVER_ERROR = 5011,
    CU_FILE_CUDA_POINTER_INVALID = 5012,
    CU_FILE_CUDA_MEMORY_TYPE_INVALID = 5013,
    CU_FILE_CUDA_POINTER_RANGE_ERROR = 5014,
    CU_FILE_CUDA_CONTEXT_MISMATCH = 5015,
    CU_FILE_INVALID_MAPPING_SIZE = 5016,
    CU_FILE_INVALID_MAPPING_RANGE = 5017,
    CU_FILE_INVALID_FILE_TYPE = 5018,
    CU_FILE_INVALID_FILE_OPEN_FLAG = 5019,
    CU_FILE_DIO_NOT_SET = 5020,
    CU_FILE_INVALID_VALUE = 5022,
    CU_FILE_MEMORY_ALREADY_REGISTERED = 5023,
    CU_FILE_MEMORY_NOT_REGISTERED = 5024,
    CU_FILE_PERMISSION_DENIED = 5025,
    CU_FILE_DRIVER_ALREADY_OPEN = 5026,
    CU_FILE_HANDLE_NOT_REGISTERED = 5027,
    CU_FILE_HANDLE_ALREADY_REGISTERED = 5028,
    CU_FILE_DEVICE_NOT_FOUND = 5029,
    CU_FILE_INTERNAL_ERROR = 5030,
    CU_FILE_GETNEWFD_FAILED = 5031,
    CU_FILE_NVFS_SETUP_ERROR = 5033,
    CU_FILE_IO_DISABLED = 5034,
    CU_FILE_BATCH_SUBMIT_FAILED = 5035,
    CU_FILE_GPU_MEMORY_PINNING_FAILED = 5036,
    CU_FILE_BATCH_FULL = 5037,
    CU_FILE_ASYNC_NOT_SUPPORTED = 5038
};
typedef int CUfileOpError;

/* The numbers above are larger than this; what a call answers may be negative. */
#define CUFILEOP_BASE_ERR 5000
#define IS_CUFILE_ERR(error) ((error) > CUFILEOP_BASE_ERR || -(error) > CUFILEOP_BASE_ERR)
#define CUFILE_ERRSTR(error) cufileop_status_error((CUfileOpError)((error) < 0 ? -(error) : (error)))
#define IS_CUDA_ERR(status) ((status).err == CU_FILE_CUDA_DRIVER_ERROR)
#define CU_FILE_CUDA_ERR(status) ((status).cu_err)

/* What most functions answer; cu_err is the CUDA driver's own answer where it has a part in it. */
typedef struct CUfileError {
    CUfileOpError err;
    CUresult cu_err;
} CUfileError_t;

/* A number in words. */
static inline const char *cufileop_status_error(CUfileOpError error) {
    switch (error) {
    case CU_FILE_SUCCESS: return "success";
    case CU_FILE_DRIVER_NOT_INITIALIZED: return "the driver is not open";
    case CU_FILE_DRIVER_UNSUPPORTED_LIMIT: return "the limit is outside what is supported";
    case CU_FILE_PLATFORM_NOT_SUPPORTED: return "the platform is not supported";
    case CU_FILE_IO_NOT_SUPPORTED: return "this kind of file handle is not supported";
    case CU_FILE_CUDA_DRIVER_ERROR: return "the CUDA driver answered an error";
    case CU_FILE_CUDA_POINTER_INVALID: return "the pointer is not one of the CUDA driver";
    case CU_FILE_CUDA_MEMORY_TYPE_INVALID: return "this kind of memory cannot be registered";
    case CU_FILE_CUDA_POINTER_RANGE_ERROR: return "the range does not lie inside its allocation";
    case CU_FILE_INVALID_MAPPING_RANGE: return "the range does not lie inside the registered buffer";
    case CU_FILE_INVALID_FILE_TYPE: return "the file has no bytes at offsets";
    case CU_FILE_INVALID_FILE_OPEN_FLAG: return "the file was opened with flags that do not allow this";
    case CU_FILE_INVALID_VALUE: return "an argument is not valid";
    case CU_FILE_MEMORY_ALREADY_REGISTERED: return "the memory is registered already";
    case CU_FILE_MEMORY_NOT_REGISTERED: return "the memory is not registered";
    case CU_FILE_DRIVER_ALREADY_OPEN: return "the driver is open already";
    case CU_FILE_HANDLE_NOT_REGISTERED: return "the file handle is not registered";
    case CU_FILE_HANDLE_ALREADY_REGISTERED: return "the file descriptor is registered already";
    case CU_FILE_DEVICE_NOT_FOUND: return "the device was not found";
    case CU_FILE_INTERNAL_ERROR: return "an internal error";
    case CU_FILE_GETNEWFD_FAILED: return "no descriptor of the other kind could be had";
    case CU_FILE_IO_DISABLED: return "I/O is disabled in this process";
    case CU_FILE_BATCH_FULL: return "the batch has no room for so many entries";
    case CU_FILE_ASYNC_NOT_SUPPORTED: return "stream-ordered I/O is not supported here";
    default: return "an error of cuFile that this library does not answer";
    }
}

/* ---- open and close: counted; most calls open by themselves ---- */
CUfileError_t cuFileDriverOpen(void);
CUfileError_t cuFileDriverClose(void);
CUfileError_t cuFileDriverClose_v2(void);
long cuFileUseCount(void);
CUfileError_t cuFileGetVersion(int *version); /* 1000 * major + 10 * minor */

/* Bits of dcontrolflags, by number. */
typedef enum CUfileDriverControlFlags {
    CU_FILE_USE_POLL_MODE = 0,
    CU_FILE_ALLOW_COMPAT_MODE = 1
} CUfileDriverControlFlags_t;

typedef struct CUfileDrvProps {
    struct {
        unsigned int major_version;
        unsigned int minor_version;
        size_t poll_thresh_size;
        size_t max_direct_io_size;
        unsigned int dstatusflags;
        unsigned int dcontrolflags;
    } nvfs;
    unsigned int fflags;
    unsigned int max_device_cache_size;
    unsigned int per_buffer_cache_size;
    unsigned int max_device_pinned_mem_size;
    unsigned int max_batch_io_size;
    unsigned int max_batch_io_timeout_msecs;
} CUfileDrvProps_t;

CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t *props);
CUfileError_t cuFileDriverSetPollMode(bool poll, size_t threshold_kb);
CUfileError_t cuFileDriverSetMaxDirectIOSize(size_t kb);
CUfileError_t cuFileDriverSetMaxCacheSize(size_t kb);
CUfileError_t cuFileDriverSetMaxPinnedMemSize(size_t kb);
CUfileError_t cuFileDriverSetP2PFlags(unsigned int driver, unsigned int flags);
CUfileError_t cuFileDriverGetP2PFlags(unsigned int driver, unsigned int *flags);
CUfileError_t cuFileGetBARSizeInKB(int gpu, size_t *kb);
CUfileError_t cuFileExportPCIeTopology(const char *path);

/* ---- files ---- */
enum CUfileFileHandleType {
    CU_FILE_HANDLE_TYPE_OPAQUE_FD = 1,
    CU_FILE_HANDLE_TYPE_OPAQUE_WIN32 = 2,
    CU_FILE_HANDLE_TYPE_USERSPACE_FS = 3
};

typedef struct CUfileDescr_t {
    int type;
    union {
        int fd;
        void *handle;
    } handle;
    const void *fs_ops;
} CUfileDescr_t;

typedef void *CUfileHandle_t;
CUfileError_t cuFileHandleRegister(CUfileHandle_t *handle, CUfileDescr_t *descr);
void cuFileHandleDeregister(CUfileHandle_t handle);

/* ---- buffers ---- */
CUfileError_t cuFileBufRegister(const void *base, size_t length, int flags);
CUfileError_t cuFileBufDeregister(const void *base);

/* ---- read and write: bytes, or -1 with errno, or a negative code ---- */
ssize_t cuFileRead(CUfileHandle_t handle, void *base, size_t size, off_t file_offset, off_t base_offset);
ssize_t cuFileWrite(CUfileHandle_t handle, const void *base, size_t size, off_t file_offset,
                    off_t base_offset);

typedef struct CUfileIOVec {
    void *base;
    size_t len;
} CUfileIOVec_t;
ssize_t cuFileReadv(CUfileHandle_t handle, const CUfileIOVec_t *iov, size_t count, off_t file_offset,
                    unsigned int flags);
ssize_t cuFileWritev(CUfileHandle_t handle, const CUfileIOVec_t *iov, size_t count, off_t file_offset,
                     unsigned int flags);

/* ---- batches ---- */
typedef enum CUfileOpcode { CUFILE_READ = 0, CUFILE_WRITE = 1 } CUfileOpcode_t;
typedef enum CUfileBatchMode { CUFILE_BATCH = 1 } CUfileBatchMode_t;
typedef enum CUfileStatus_enum {
    CUFILE_WAITING = 1,
    CUFILE_PENDING = 2,
    CUFILE_INVALID = 4,
    CUFILE_CANCELED = 8,
    CUFILE_COMPLETE = 16,
    CUFILE_TIMEOUT = 32,
    CUFILE_FAILED = 64
} CUfileStatus_t;

typedef struct CUfileIOParams {
    int mode;
    union {
        struct {
            void *devPtr_base;
            off_t file_offset;
            off_t devPtr_offset;
            size_t size;
        } batch;
    } u;
    CUfileHandle_t fh;
    int opcode;
    void *cookie;
} CUfileIOParams_t;

/* ret is bytes, or for CUFILE_FAILED a negative number in a size_t */
typedef struct CUfileIOEvents {
    void *cookie;
    int status;
    size_t ret;
} CUfileIOEvents_t;

typedef void *CUfileBatchHandle_t;
CUfileError_t cuFileBatchIOSetUp(CUfileBatchHandle_t *batch, unsigned int entries);
CUfileError_t cuFileBatchIOSubmit(CUfileBatchHandle_t batch, unsigned int count, CUfileIOParams_t *entries,
                                  unsigned int flags);
CUfileError_t cuFileBatchIOGetStatus(CUfileBatchHandle_t batch, unsigned int least, unsigned int *count,
                                     CUfileIOEvents_t *events, struct timespec *timeout);
CUfileError_t cuFileBatchIOCancel(CUfileBatchHandle_t batch);
void cuFileBatchIODestroy(CUfileBatchHandle_t batch);

/* ---- in stream order: the variables are read when the stream comes to the call ---- */
#define CU_FILE_STREAM_FIXED_BUF_OFFSET 1
#define CU_FILE_STREAM_FIXED_FILE_OFFSET 2
#define CU_FILE_STREAM_FIXED_FILE_SIZE 4
#define CU_FILE_STREAM_PAGE_ALIGNED_INPUTS 8
CUfileError_t cuFileReadAsync(CUfileHandle_t handle, void *base, size_t *size, off_t *file_offset,
                              off_t *base_offset, ssize_t *bytes_read, CUstream stream);
CUfileError_t cuFileWriteAsync(CUfileHandle_t handle, void *base, size_t *size, off_t *file_offset,
                               off_t *base_offset, ssize_t *bytes_written, CUstream stream);
CUfileError_t cuFileStreamRegister(CUstream stream, unsigned int flags);
CUfileError_t cuFileStreamDeregister(CUstream stream);

/* ---- parameters: set while closed ---- */
typedef int CUFileSizeTConfigParameter_t, CUFileBoolConfigParameter_t, CUFileStringConfigParameter_t;
CUfileError_t cuFileGetParameterSizeT(int parameter, size_t *value);
CUfileError_t cuFileGetParameterBool(int parameter, bool *value);
CUfileError_t cuFileGetParameterString(int parameter, char *value, int length);
CUfileError_t cuFileSetParameterSizeT(int parameter, size_t value);
CUfileError_t cuFileSetParameterBool(int parameter, bool value);
CUfileError_t cuFileSetParameterString(int parameter, const char *value);
CUfileError_t cuFileGetParameterMinMaxValue(int parameter, size_t *least, size_t *most);
CUfileError_t cuFileSetParameterPosixPoolSlabArray(const size_t *kb, const size_t *counts, int length);
CUfileError_t cuFileGetParameterPosixPoolSlabArray(size_t *kb, size_t *counts, int length);
CUfileError_t cuFileSetParameterGpuBounceBufferSlabArray(const size_t *kb, const size_t *counts, int length);
CUfileError_t cuFileGetParameterGpuBounceBufferSlabArray(size_t *kb, size_t *counts, int length);

/* ---- statistics ---- */
typedef struct CUfileOpCounter {
    uint64_t ok, err;
} CUfileOpCounter_t;

typedef struct CUfileStatsLevel1 {
    CUfileOpCounter_t read_ops, write_ops, hdl_register_ops, hdl_deregister_ops, buf_register_ops,
        buf_deregister_ops;
    uint64_t read_bytes, write_bytes, read_bw_bytes_per_sec, write_bw_bytes_per_sec, read_lat_avg_us,
        write_lat_avg_us, read_ops_per_sec, write_ops_per_sec, read_lat_sum_us, write_lat_sum_us;
    CUfileOpCounter_t batch_submit_ops, batch_complete_ops, batch_setup_ops, batch_cancel_ops,
        batch_destroy_ops, batch_enqueued_ops, batch_posix_enqueued_ops, batch_processed_ops,
        batch_posix_processed_ops, batch_nvfs_submit_ops, batch_p2p_submit_ops, batch_aio_submit_ops,
        batch_iouring_submit_ops, batch_mixed_io_submit_ops, batch_total_submit_ops;
    uint64_t batch_read_bytes, batch_write_bytes, batch_read_bw_bytes, batch_write_bw_bytes,
        batch_submit_lat_avg_us, batch_completion_lat_avg_us, batch_submit_ops_per_sec,
        batch_complete_ops_per_sec, batch_submit_lat_sum_us, batch_completion_lat_sum_us,
        last_batch_read_bytes, last_batch_write_bytes;
    CUfileOpCounter_t readv_ops, writev_ops; /* from here on since 1.18 */
    uint64_t vector_words[10];
} CUfileStatsLevel1_t;

typedef struct CUfileStatsLevel2 {
    CUfileStatsLevel1_t basic;
    uint64_t read_size_kb_hist[32];
    uint64_t write_size_kb_hist[32];
} CUfileStatsLevel2_t;

typedef struct CUfilePerGpuStats {
    char uuid[16];
    uint64_t read_bytes, read_bw_bytes_per_sec, read_utilization, read_duration_us, n_total_reads,
        n_p2p_reads, n_nvfs_reads, n_posix_reads, n_unaligned_reads, n_dr_reads, n_sparse_regions,
        n_inline_regions, n_reads_err;
    uint64_t writes_bytes, write_bw_bytes_per_sec, write_utilization, write_duration_us, n_total_writes,
        n_p2p_writes, n_nvfs_writes, n_posix_writes, n_unaligned_writes, n_dr_writes, n_writes_err;
    uint64_t n_mmap, n_mmap_ok, n_mmap_err, n_mmap_free, reg_bytes;
} CUfilePerGpuStats_t;

typedef struct CUfileStatsLevel3 {
    CUfileStatsLevel2_t detailed;
    uint32_t num_gpus;
    CUfilePerGpuStats_t per_gpu_stats[16];
} CUfileStatsLevel3_t;

CUfileError_t cuFileSetStatsLevel(int level);
CUfileError_t cuFileGetStatsLevel(int *level);
CUfileError_t cuFileStatsStart(void);
CUfileError_t cuFileStatsStop(void);
CUfileError_t cuFileStatsReset(void);
CUfileError_t cuFileGetStatsL1(CUfileStatsLevel1_t *stats);
CUfileError_t cuFileGetStatsL2(CUfileStatsLevel2_t *stats);
CUfileError_t cuFileGetStatsL3(CUfileStatsLevel3_t *stats);

#ifdef __cplusplus
}
#endif
#endif
