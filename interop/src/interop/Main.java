package interop;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonArray;
import com.google.gson.JsonObject;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletionException;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.redisson.Redisson;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * Puts Redisson at the disposal of another program: it reads commands from its standard input, a JSON object a line, and
 * answers them on its standard output, in the order in which they end. It ends with its input.
 *
 * <p>A command has an id, which its answer repeats, beside a value or an error. What it does:
 *
 * <ul>
 *   <li>version: the value is the version of Redisson
 *   <li>open: makes a client of a config in YAML; the value is its id
 *   <li>close: shuts the client down
 *   <li>call: calls a method of an object of a client (see Objects); an asynchronous method has ended when its future has
 *   <li>cancel: cancels the future of the call with that number
 * </ul>
 *
 * <p>Asynchronous calls are made in the order of the commands; everything else runs in a thread of its own.
 */
public final class Main {
  private static final Gson GSON = new GsonBuilder().serializeNulls().create();
  private static final Set<Class<?>> WRAPPERS =
      Set.of(CompletionException.class, ExecutionException.class, InvocationTargetException.class);

  private final Map<String, RedissonClient> clients = new ConcurrentHashMap<>();
  private final Map<Long, Future<?>> calls = new ConcurrentHashMap<>();
  private final ExecutorService threads = Executors.newCachedThreadPool();
  private final PrintStream out;

  private Main(PrintStream out) {
    this.out = out;
  }

  public static void main(String[] args) throws IOException {
    PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    System.setOut(System.err); // whatever else is printed is no answer
    Main main = new Main(out);
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line = in.readLine(); line != null; line = in.readLine()) {
      main.take(GSON.fromJson(line, JsonObject.class));
    }
    Runtime.getRuntime().halt(0);
  }

  private void take(JsonObject command) {
    long id = command.get("id").getAsLong();
    try {
      switch (command.get("do").getAsString()) {
        case "version" -> answer(id, Redisson.class.getPackage().getImplementationVersion(), null);
        case "open" -> inThread(id, () -> open(command));
        case "close" -> inThread(id, () -> close(command));
        case "call" -> call(id, command);
        case "cancel" -> {
          Future<?> future = calls.get(command.get("call").getAsLong());
          answer(id, future != null && future.cancel(true), null);
        }
        default -> throw new IllegalArgumentException("what is " + command.get("do") + "?");
      }
    } catch (Throwable e) {
      answer(id, null, e);
    }
  }

  private Object open(JsonObject command) throws IOException {
    RedissonClient client = Redisson.create(Config.fromYAML(command.get("config").getAsString()));
    clients.put(command.get("client").getAsString(), client);
    return client.getId();
  }

  private Object close(JsonObject command) {
    clients.remove(command.get("client").getAsString()).shutdown(0, 2, TimeUnit.SECONDS);
    return null;
  }

  private void call(long id, JsonObject command) throws ReflectiveOperationException {
    Object object = Objects.find(clients, command.getAsJsonObject("object"));
    String method = command.get("method").getAsString();
    JsonArray args = command.getAsJsonArray("args");
    if (!method.endsWith("Async")) {
      inThread(id, () -> Objects.invoke(object, method, args));
      return;
    }
    Object future = Objects.invoke(object, method, args);
    calls.put(id, (Future<?>) future);
    ((CompletionStage<?>) future)
        .whenComplete(
            (value, error) -> {
              calls.remove(id);
              answer(id, value, error);
            });
  }

  private interface Work {
    Object run() throws Exception;
  }

  private void inThread(long id, Work work) {
    threads.execute(
        () -> {
          try {
            answer(id, work.run(), null);
          } catch (Throwable e) {
            answer(id, null, e);
          }
        });
  }

  private synchronized void answer(long id, Object value, Throwable error) {
    JsonObject answer = new JsonObject();
    answer.addProperty("id", id);
    if (error == null) {
      answer.add("value", GSON.toJsonTree(value));
    } else {
      while (WRAPPERS.contains(error.getClass())) {
        error = error.getCause();
      }
      answer.addProperty("error", error.getClass().getSimpleName());
      answer.addProperty("message", String.valueOf(error.getMessage()));
    }
    out.println(GSON.toJson(answer));
  }
}
