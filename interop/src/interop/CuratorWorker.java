package interop;

import com.google.gson.JsonObject;
import java.io.IOException;
import java.util.HashMap;
import java.util.Map;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.ExponentialBackoffRetry;

/** The tasks of redlatch's benchmarks with Curator, on ZooKeeper. */
public final class CuratorWorker extends Worker {
  private static final int SESSION_MILLIS = 30_000; // the lease in peers_redis.go
  private static final int CONNECTION_MILLIS = 15_000; // Curator's default

  private static final Map<String, CuratorFramework> CLIENTS = new HashMap<>();

  private CuratorWorker(JsonObject task) {
    super(task);
  }

  public static void main(String[] args) throws IOException {
    serve(CuratorWorker::new);
  }

  /** Returns the client of a server, which all threads share. */
  private static CuratorFramework client(String addr) {
    return CLIENTS.computeIfAbsent(
        addr,
        key -> {
          CuratorFramework client =
              CuratorFrameworkFactory.newClient(
                  addr, SESSION_MILLIS, CONNECTION_MILLIS, new ExponentialBackoffRetry(1000, 3)); // as in its documentation
          client.start();
          return client;
        });
  }

  @Override
  Operation operation(String name) {
    if (!task.get("kind").getAsString().equals("lock")) {
      throw new IllegalArgumentException("Curator has no " + task.get("kind"));
    }
    String addr = task.getAsJsonArray("addrs").get(0).getAsString();
    InterProcessMutex mutex = new InterProcessMutex(client(addr), "/" + name);
    return new Operation() {
      @Override
      public void acquire() throws Exception {
        mutex.acquire();
      }

      @Override
      public void release() throws Exception {
        mutex.release();
      }
    };
  }
}
